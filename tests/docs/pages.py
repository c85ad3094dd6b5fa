"""The pages of the documentation, the code on them, and runs that they are made from."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FOLDERS = ("benchmarks", "docs", "examples", "recipes", "tests", "tools")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in _FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCE = re.compile(r"^( *)(```+)(\w*)[^\n]*\n(.*?)^\1\2", re.MULTILINE | re.DOTALL)
# Four spaces after an empty line; in a list they are its text.
_INDENTED = re.compile(r"(?<=\n\n)((?: {4}[^\n]*\n|\n(?= {4}))+)")
_SPAN = re.compile(r"`([^`\n]+)`")


class Code(NamedTuple):
    """A piece of code on a page; ``language`` is empty where none is given."""

    language: str
    text: str


def code_of(page: Path) -> Iterator[Code]:
    """Yield the fenced and indented blocks of a page, and the spans in its text."""
    text = page.read_text(encoding="utf-8")
    for _, _, language, block in _FENCE.findall(text):
        yield Code(language, block)
    text = _FENCE.sub("\n", text)
    for block in _INDENTED.findall(text):
        yield Code("", block)
    for span in _SPAN.findall(_INDENTED.sub("\n", text)):
        yield Code("", span)


def prose_of(page: Path) -> str:
    """Return the page without its blocks and spans of code."""
    text = _FENCE.sub("\n", page.read_text(encoding="utf-8"))
    return _SPAN.sub("`code`", _INDENTED.sub("\n", text))


def write_finished(
    study: Path, name: str, seed: int, command: list[str], machine: dict, lines: list[dict]
) -> Path:
    """Write a finished run with the lines of its log into a study's folder, and return that."""
    folder = study / f"{name}-{seed}"
    folder.mkdir(parents=True)
    state = {"name": name, "seed": seed, "command": command, "finished": True, "machine": machine}
    (folder / "study.json").write_text(json.dumps(state))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return study
