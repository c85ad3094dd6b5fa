"""What command lines have in common."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_lowbit.errors import UserError

_SHELLS = ("bash", "zsh", "tcsh")
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
_FILES = ("PATH", "FILE", "DIR", "FOLDER", "PREFIX", "NAME_OR_FILE")


class CommandParser(argparse.ArgumentParser):
    """Bad input is a UserError, which is one line; ``--help`` says units and defaults.

    A description is shown as it is written. Where a parser reads files of arguments, they may have
    several in a line, and comments.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **settings})

    def error(self, message: str) -> NoReturn:
        """Raise what a bad value raises elsewhere."""
        raise UserError(message)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """One line of a file of arguments."""
        return shlex.split(arg_line, comments=True)


def command_parser(**settings: Any) -> CommandParser:
    """The parser of a command that is installed: one that shells can complete."""
    parser = CommandParser(**settings)
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=_SHELLS,
        help="print this shell's completion script and exit",
    )  # fmt: skip
    return parser


def split_at_dashes(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """A command's own arguments, and those behind ``--`` that it hands on; None is sys.argv."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


class _Help(argparse.RawDescriptionHelpFormatter):
    """Numbers are N and X, not the option's name again; what is required says so, and defaults."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32, **settings})

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _METAVARS.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help
        if not text or not action.option_strings or "default" in text:
            return text
        if action.required:
            return f"{text} (required)"
        if default in (None, argparse.SUPPRESS) or isinstance(default, bool | list | tuple):
            return text
        return f"{text} (default: %(default)s)"


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, *__: Any) -> None:
        import shtab  # wanted here alone

        for action in _actions(parser):
            if action.metavar in _FILES or action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell=shell))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a command and its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                yield from _actions(subcommand)
