"""Phrases that read as translated become fewer: on pages, in docstrings and in messages."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import PAGES, ROOT, prose_of

FOLDERS = ("megatron_lowbit", "benchmarks", "docs", "tools", "examples", "tests")
AMOUNT = "scale|bits|bytes|elements|tokens|iterations|steps|ms|µs|GB|GiB|FLOPs?|TFLOP/s"
UNIT = (
    "tensor|row|column|block|tile|element|value|weight|parameter|token|second|step|iteration|layer"
    "|micro ?batch|GPU|rank|thread|day"
)


class Tic(NamedTuple):
    """A phrase: an example, its better form, and how often it may occur."""

    pattern: str
    example: str
    better: str
    pages: int
    docstrings: int
    messages: int


# Limits are what is left: lower them with each removal, do not raise them.
TICS = (
    Tic(rf"\b(?:{AMOUNT}) an? (?:{UNIT})\b", "one scale a tensor", "one scale per tensor", 0, 0, 0),
    Tic(r"\bbeside\b", "beside the recipe", "next to the recipe", 0, 0, 0),
    Tic(r"\banew\b", "is built anew", "is built again", 0, 0, 0),
    Tic(r"\bmerely\b", "merely a name", "only a name", 0, 0, 0),
    Tic(r"\bmended\b", "was mended", "was fixed", 0, 0, 0),
    Tic(r"\bbeforehand\b", "known beforehand", "known in advance", 0, 0, 0),
    Tic(r"\bfor ever\b", "waits for ever", "waits forever", 0, 0, 0),
    Tic(r"\bthat of\b", "that of the weight", "the scale of the weight", 0, 1, 0),
    Tic(r"\bthose of\b", "those of training", "the bits of training", 1, 0, 0),
    Tic(r", where (?:`\w[^`]*`|\w+) (?:has|had|takes)\b", "1.4, where `nvfp4` has 0.9",
        "1.4, compared with 0.9 for `nvfp4`", 0, 0, 0),
    Tic(r"\b(?:leave|leaves|leaving|left) (?:\w+ ){0,3}out\b", "is left out", "is ignored",
        4, 0, 0),
    Tic(r"(?m)^#+ (?:What|Where|Which|Who|How)\b", "## What T does", "## Effect of T", 0, 0, 0),
    Tic(r"\AReturn (?:what|how|where|whether)\b", "Return what is kept", "Return the run",
        0, 0, 0),
)  # fmt: skip


@cache
def pages() -> tuple[str, ...]:
    """Return the prose of each page; the changelog keeps the words of its time."""
    return tuple(prose_of(page) for page in PAGES if page.name != "CHANGELOG.md")


@cache
def docstrings() -> tuple[str, ...]:
    """Return all docstrings but those of this file, whose examples are tics."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    others = sorted(file for file in files if file.name != Path(__file__).name)
    return tuple(text for file in others for text, is_docstring in texts(file) if is_docstring)


@cache
def messages() -> tuple[str, ...]:
    """Return the other texts of the package, help and errors among them, and all recipes."""
    files = (ROOT / "megatron_lowbit").rglob("*.py")
    found = (text for file in files for text, is_docstring in texts(file) if not is_docstring)
    return *found, *(file.read_text(encoding="utf-8") for file in ROOT.glob("recipes/*.yaml"))


def texts(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield the strings of a module, each with True for a docstring."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, documented))
    first = {getattr(body[0], "value", None) for body in bodies if body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield inspect.cleandoc(node.value), node in first


def count(pattern: str, texts: tuple[str, ...]) -> int:
    return sum(len(re.findall(pattern, text)) for text in texts)


@pytest.mark.parametrize("tic", TICS, ids=lambda tic: tic.example)
def test_tics_do_not_grow(tic: Tic):
    assert count(tic.pattern, pages()) <= tic.pages, f"on pages: write {tic.better!r}"
    assert count(tic.pattern, docstrings()) <= tic.docstrings, f"in docstrings: {tic.better!r}"
    assert count(tic.pattern, messages()) <= tic.messages, f"in messages: {tic.better!r}"


@pytest.mark.parametrize("tic", TICS, ids=lambda tic: tic.example)
def test_patterns_find_the_example_only(tic: Tic):
    assert re.search(tic.pattern, tic.example) and not re.search(tic.pattern, tic.better)
