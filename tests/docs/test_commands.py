"""Scripts, targets, files and options that the pages' commands name exist; Python compiles."""

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import NAMES, PAGES, ROOT, code_of

from megatron_lowbit.arguments.parse import _REFUSED

SHELL = ("", "sh", "bash", "shell", "console", "text")
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
TARGETS = set(re.findall(r"^([\w./-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
TRAINING = "lowbit-pretrain"
SEPARATORS = {"&&", "||", "|", ";", "do", "then", "exec", "time", "env"}
PLACEHOLDER = re.compile(r"\.\.\.|[A-Z_]{2,}\b|\$|[\[{<*…]")


class Parsed(Exception):
    """Signal that a command is about to parse its arguments."""


class Options(NamedTuple):
    """Parser of a command, and whether the command hands on the rest to training."""

    parser: argparse.ArgumentParser
    hands_on: bool


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block of shell."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        try:
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        except ValueError:
            continue  # prose with an apostrophe, or a quoted text of several lines
        command: list[str] = []
        for word in [*words, ";"]:
            if word in SEPARATORS:
                yield command
                command = []
            elif command or not re.match(r"\w+=", word):
                command.append(word)


def program(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the program and arguments of a command; None for a command of another project.

    It runs a script's path, a console script's name, or ``-m MODULE``; of benchmarks each is one.
    """
    if not words:
        return None
    first = Path(words[0]).name
    if first in ("docker", "srun", "torchrun"):
        for at, word in enumerate(words):
            if word in SCRIPTS or word.endswith(".py"):
                return word, words[at + 1 :]
            if words[at : at + 2] == ["-m", "benchmarks"]:
                return program(["python", *words[at:]])
    if first in SCRIPTS:
        return first, words[1:]
    if re.fullmatch(r"python[\d.]*", first) and len(words) > 1:
        if words[1:3] == ["-m", "benchmarks"]:
            return " ".join(words[1:4]), words[4:]
        if words[1] == "-m" and len(words) > 2:
            return f"-m {words[2]}", words[3:]
        if words[1].endswith(".py"):
            return words[1], words[2:]
    return None


@contextmanager
def caught(name: str, beside: Path) -> Iterator[None]:
    """Pretend to be started as ``name``; modules next to a script can be imported inside."""

    def stop(strict):
        def parse(parser, *_, **__):
            raise Parsed(Options(parser, not strict))

        return parse

    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *name.split()[2:]])  # the benchmark of -m benchmarks
        patch.setattr(sys, "path", [str(beside), *sys.path])
        patch.setattr(argparse.ArgumentParser, "parse_args", stop(strict=True))
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop(strict=False))
        yield
    for module in set(sys.modules) - known:
        if Path(getattr(sys.modules[module], "__file__", None) or "/").parent == beside:
            del sys.modules[module]


@cache
def options(name: str) -> Options | None:
    """Return the options of a program, from its parser; None without a parser."""
    script = ROOT / name
    with caught(name, script.parent):
        try:
            if name in SCRIPTS:
                module, _, function = SCRIPTS[name].partition(":")
                getattr(import_module(module), function)()
            elif name.startswith("-m "):
                runpy.run_module(name.split()[1], run_name="__main__")
            else:
                found = runpy.run_path(str(script))
                # A script without a function of that name starts under its guard.
                start = found.get("main") or partial(runpy.run_path, str(script), None, "__main__")
                start()
        except Parsed as parsed:
            return parsed.args[0]
    return None


def test_options_are_found():
    """Without a parser every option would be accepted."""
    assert "--recipe-set" in options(TRAINING).parser._option_string_actions
    for script in ("pretrain_gpt.py", "pretrain_hybrid.py", "examples/own_script.py"):
        assert "--precision-recipe" in options(script).parser._option_string_actions
    assert options("-m megatron_lowbit.recipes").parser._subparsers is not None
    assert options("-m benchmarks plan_check").hands_on
    assert not options("tools/plot_loss.py").hands_on


def check(name: str, arguments: list[str]) -> None:
    """Assert that a program takes the arguments, and training those that it hands on."""
    takes = options(name)
    if takes is None:
        return
    known, behind = actions(takes.parser, arguments), ["--"]
    behind += [option for option, action in known.items() if action.nargs == argparse.REMAINDER]
    if takes.hands_on:
        known = actions(options(TRAINING).parser, []) | known
    for at, word in enumerate(arguments):
        if word in behind:
            check(TRAINING, arguments[at + 1 :])
            return
        if word.startswith("@examples/"):
            assert (ROOT / word[1:]).is_file(), word
        # [--json] and {--last N} are notations.
        option, _, value = word.strip("[]{}()").partition("=")
        if option.startswith("--"):
            assert option in known, f"{name} has no {option}"
            value = value or " ".join(arguments[at + 1 : at + 2])
            choices = known[option].nargs is None and known[option].choices
            concrete = choices and not PLACEHOLDER.match(value)
            assert not concrete or value in choices, f"{name} {option} {value}: {list(choices)}"


def actions(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, argparse.Action]:
    """Return a parser's options by their names, with the options of the given subcommand."""
    found = dict(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            given = next((word for word in arguments if not word.startswith("-")), "...")
            if not PLACEHOLDER.match(given):
                assert given in action.choices, f"{given} is none of {list(action.choices)}"
                found |= action.choices[given]._option_string_actions
    return found


def check_command(words: list[str]) -> None:
    """Assert that whatever a command of this project names exists."""
    if words[0] == "make":
        wanted = [w for w in words[1:] if re.fullmatch(r"[\w./-]+", w) and not w.startswith("-")]
        assert set(wanted) <= TARGETS, f"make {' '.join(wanted)}: there are {sorted(TARGETS)}"
    runs_pytest = words[0].endswith("pytest") or words[:3] == ["python", "-m", "pytest"]
    if runs_pytest:
        for word in words[1:]:
            path = word.partition("::")[0]
            assert not path.startswith("tests") or (ROOT / path).exists(), path
    found = program(words)
    if found is None:
        return
    name, arguments = found
    if name.startswith("-m "):
        module = ".".join(name.split()[1:])
        if not module.startswith(("megatron_lowbit", "benchmarks")):
            return
        assert find_spec(module), name
    elif name not in SCRIPTS:
        assert not name.startswith("benchmarks/"), f"{name}: -m benchmarks {Path(name).stem}"
        # The page's own files are written as they are named in it: launch.py, not DIR/launch.py.
        if ("/" not in name and not (ROOT / name).is_file()) or PLACEHOLDER.match(name):
            return
        assert (ROOT / name).is_file(), name
    check(name, arguments)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands(page: Path):
    for code in code_of(page):
        if code.language in SHELL:
            for words in commands(code.text):
                if words:
                    check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_compiles(page: Path):
    for code in code_of(page):
        if code.language in ("python", "py"):
            compile(code.text, str(page), "exec")


@pytest.mark.parametrize(
    "command",
    [
        "python tools/plot_los.py",
        "python tools/plot_loss.py --out x",
        "lowbit-study run a.yaml --output x -- --lrr 1",
        "lowbit-pretrain --lr-decay-style cubic",
        "lowbit-recipes shw nvfp4",
        "torchrun --nproc-per-node 2 pretrain_gpt.py @examples/none.args",
        "python -m benchmarks linear --recipez bf16",
        "python benchmarks/linear.py",
        "make pretain",
        "pytest tests/numerix",
    ],
)
def test_a_wrong_command_is_found(command):
    with pytest.raises(AssertionError):
        check_command(shlex.split(command))


def test_the_table_of_refused_arguments_is_complete_and_sorted():
    """With the arguments that no run supports; others are refused only together."""
    page = (ROOT / "docs" / "megatron-lm.md").read_text()
    section = page.partition("## Refused or missing features\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*", section, re.MULTILINE)[2:]
    assert rows == sorted(rows, key=str.lower)
    assert [flag for flag in _REFUSED if f"`{flag}`" not in section] == []
