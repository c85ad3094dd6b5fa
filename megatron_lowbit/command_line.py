"""Command-line parsing shared by all commands. Imports no torch, so that ``--help`` is quick."""

import argparse
import enum
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.version import __version__

_SHELLS = ("bash", "zsh", "tcsh", "fish")
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
_MOST_FILES = 100
_LARGEST_FILE = 1 << 20
HELP_WIDTH = 100
_FILES = ("PATH", "FILE", "DIR", "FOLDER", "PREFIX", "NAME_OR_FILE", "[NAME=]RUN")


class CommandParser(argparse.ArgumentParser):
    """Parser that raises a one-line UserError on bad input and shows units and defaults in help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **settings})

    def error(self, message: str) -> NoReturn:
        """Raise a UserError instead of printing the usage and exiting."""
        raise UserError(message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string and (action.metavar in _FILES or action.type is Path):
            # An unset shell variable gives it; pathlib would take it for the working directory.
            raise argparse.ArgumentError(action, "the name is empty")
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            raise
        except Exception:
            # Types of Megatron-LM that look names up raise what argparse does not catch.
            hint = f"; use one of {_names(action.choices)}" if action.choices else ""
            raise argparse.ArgumentError(action, f"invalid value: {arg_string!r}{hint}") from None


def command_parser(**settings: Any) -> CommandParser:
    """Build the parser of an installed command, with :func:`add_exits`."""
    parser = CommandParser(**settings)
    add_exits(parser)
    return parser


def add_command(
    commands: "argparse._SubParsersAction[CommandParser]", name: str, summary: str, **settings: Any
) -> CommandParser:
    """Add a subcommand; the summary is in the help of the command and of the subcommand."""
    description = f"{summary[0].upper()}{summary[1:]}."
    return commands.add_parser(name, help=summary, description=description, **settings)


def value_of(args: argparse.Namespace, flag: str) -> Any:
    """Return the value of an argument by its flag, such as ``--data-path``."""
    return getattr(args, flag[2:].replace("-", "_"))


def add_exits(parser: argparse.ArgumentParser) -> None:
    """Add ``--version`` and ``--print-completion SHELL``, which print and exit."""
    parser.add_argument(
        "--version", action="version", version=f"megatron-lowbit {__version__}",
        help="print the version and exit",
    )  # fmt: skip
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=_SHELLS,
        help="print this shell's completion script and exit",
    )  # fmt: skip


def expand_files(argv: Iterable[str]) -> list[str]:
    """Replace every ``@FILE`` by the arguments that the file holds.

    A file is split like a shell command: quotes, comments and backslashes at line ends work. Files
    may name further files, relative to the working directory. Where there is no file of the name,
    it may be a preset's, as :func:`shipped_presets` names it. Raises UserError for a file that is
    missing, too large, not text, has an open quote or includes itself, and for too many files.
    """
    return [word for word, _ in expand_with_origin(argv)]


def expand_with_origin(argv: Iterable[str]) -> list[tuple[str, bool]]:
    """Expand files as :func:`expand_files` does; True marks the arguments of presets."""
    left = iter(range(_MOST_FILES))

    def expand(
        arguments: Iterable[str], opened: tuple[Path, ...], of_preset: bool = False
    ) -> Iterator[tuple[str, bool]]:
        for argument in arguments:
            if not argument.startswith("@"):
                yield argument, of_preset
                continue
            try:
                path = _argument_file(argument[1:])
                require(path not in opened, f"{argument}: the file includes itself")
                require(next(left, None) is not None, f"{argument}: more than {_MOST_FILES} files")
                with path.open("rb") as file:
                    content = file.read(_LARGEST_FILE + 1)
                require(
                    len(content) <= _LARGEST_FILE, f"{argument}: larger than {_LARGEST_FILE} bytes"
                )
                text = content.decode("utf-8").replace("\r\n", "\n").replace("\\\n", " ")
                words = shlex.split(text, comments=True)
                # An unchanged copy of a preset counts as one.
                is_preset = content in map(Path.read_bytes, shipped_presets().values())
                yield from expand(words, (*opened, path), is_preset)
            except UserError:
                raise
            except (OSError, RuntimeError, ValueError) as error:
                # RuntimeError: links that form a loop.
                why = getattr(error, "strerror", None) or str(error)
                raise UserError(f"{argument}: {why}") from None

    return list(expand(argv, ()))


def shipped_presets() -> dict[str, Path]:
    """Return the files of arguments that come with the package, by names like examples/x.args."""
    files = (Path(__file__).parent / "examples").glob("*.args")
    return {f"examples/{file.name}": file for file in sorted(files)}


def _argument_file(name: str) -> Path:
    """Return the file of this name or, where there is none, the preset of this name."""
    path = Path(name).resolve()
    if path.exists():
        return path
    presets = shipped_presets()
    near = get_close_matches(name, presets, n=1)
    require(name in presets or not near, f"@{name}: no such file; did you mean @{''.join(near)}?")
    return presets.get(name, path)


class CommandLine:
    """Arguments of a command line in their order, to look up, replace and remove.

    Flags that set the same attribute count as one: ``--no-rope-fusion`` is also found as
    ``--disable-rope-fusion``, if the parser has both.

    Args:
        parser: a parser that knows all arguments.
        argv: command line, with files of arguments expanded.
        of_user: the same without the arguments of presets; None if there are no presets.
    """

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        argv: Iterable[str],
        of_user: Sequence[str] | None = None,
    ) -> None:
        self._destinations = {
            flag: action.dest for action in parser._actions for flag in action.option_strings
        }
        self._of_user = None if of_user is None else CommandLine(parser, of_user)
        self._entries: list[tuple[str, ...]] = []
        for token in argv:
            flag, equals, value = token.partition("=")
            if token in self._destinations:
                self._entries.append((token,))
            elif equals and flag in self._destinations:
                self._entries.append((flag, value))
            else:
                self._entries[-1] += (token,)

    def __contains__(self, flag: str) -> bool:
        return any(self._same(entry, flag) for entry in self._entries)

    def is_of_preset(self, *flags: str) -> bool:
        """Return True if some of the arguments are given, all of them by presets."""
        given = any(flag in self for flag in flags)
        return given and self._of_user is not None and not any(f in self._of_user for f in flags)

    def destinations(self) -> set[str]:
        """Return the attributes that the arguments set."""
        return {self._destinations[flag] for flag, *_ in self._entries}

    def flags(self) -> list[str]:
        """Return the names of the arguments, each once."""
        return list(dict.fromkeys(flag for flag, *_ in self._entries))

    def text(self, flag: str) -> str:
        """Return the argument as it was given last, such as ``--seq-length 512``."""
        return " ".join(next(e for e in reversed(self._entries) if self._same(e, flag)))

    def destination(self, flag: str) -> str:
        """Return the attribute that a flag sets."""
        return self._destinations[flag]

    def add(self, flag: str, *values: str) -> None:
        """Append an argument."""
        self._entries.append((flag, *values))

    def remove(self, flag: str) -> None:
        """Remove every occurrence of an argument."""
        self._entries = [entry for entry in self._entries if not self._same(entry, flag)]

    def tokens(self) -> list[str]:
        """Return the command line."""
        tokens: list[str] = []
        for flag, *values in self._entries:
            # A value that looks like a flag must stay joined to its own.
            joined = len(values) == 1 and values[0].startswith("-")
            tokens += [f"{flag}={values[0]}"] if joined else [flag, *values]
        return tokens

    def _same(self, entry: tuple[str, ...], flag: str) -> bool:
        return self._destinations[entry[0]] == self._destinations[flag]


def shell_line(words: Iterable[object]) -> str:
    r"""Join words into a shell command as ``shlex.join`` does, in printable characters only.

    Words with others, such as line breaks, are quoted as bash and zsh read them: ``$'a\x0ab'``.
    """

    def quoted(word: str) -> str:
        if word.isprintable():
            return shlex.quote(word)
        escaped = (
            char if char.isprintable() and char not in "\\'"
            else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))
            for char in word
        )  # fmt: skip
        return f"$'{''.join(escaped)}'"

    return " ".join(quoted(str(word)) for word in words)


def split_at_dashes(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Split a command line (default: the program's own) at ``--`` into own and passed arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


def print_help(parser: argparse.ArgumentParser) -> NoReturn:
    """Print the help of a parser and exit."""
    try:
        print(parser.format_help(), end="", flush=True)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that shows N and X for numbers and adds what is required, and defaults.

    A bare percent sign in a help text, which argparse cannot format, is shown as it is.
    """

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32, **settings})

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _METAVARS.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if action.metavar is None and action.choices is not None:
            shown = f"{{{_names(action.choices)}}}"
            return lambda size: (shown,) * size
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (KeyError, TypeError, ValueError):
            return action.help or ""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help
        if not text or not action.option_strings or "default" in text.lower():
            return text
        if action.required:
            return f"{text} (required)"
        if default in (None, argparse.SUPPRESS) or isinstance(default, bool | list | tuple):
            return text
        shown = default.name if isinstance(default, enum.Enum) else "%(default)s"
        return f"{text} (default: {shown})"


def _names(choices: Iterable[Any]) -> str:
    return ",".join(c.name if isinstance(c, enum.Enum) else str(c) for c in choices)


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, *__: Any) -> None:
        import shtab  # only needed here

        for action in _actions(parser):
            if action.metavar in _FILES or action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell=shell))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a command and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                yield from _actions(subcommand)
