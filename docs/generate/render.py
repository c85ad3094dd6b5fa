"""Parts of pages: tables, templates of docs/templates, sections between two markers."""

import argparse
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))  # generators import what benchmarks declare


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; None is an empty cell."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        digits = 0 if value >= 100 or value == 0 else 2 if value >= 0.01 else 4
        return f"{value:.{digits}f}"
    return str(value)


def cells(rows: Iterable[Mapping], *paths: str) -> list[list[object]]:
    """Return values of rows that were measured by dotted paths of keys; times with their spread.

    The empty path is the row itself.
    """
    return [[_at(row, path) for path in paths] for row in rows if "refused" not in row]


def _at(row: Mapping, path: str) -> object:
    value: object = row
    for key in filter(None, path.split(".")):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return f"{value['median_ms']:.3f} ± {value['iqr_ms']:.3f}"
    return value


_TEMPLATES = Environment(
    loader=FileSystemLoader(ROOT / "docs" / "templates"), undefined=StrictUndefined,
    keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.globals |= {"table": table, "cells": cells}
_TEMPLATES.filters |= {"shell": shlex.join, "shorten": partial(textwrap.shorten, width=100)}


def render(template: str, **values: object) -> str:
    """Return the text of a template of docs/templates, which can call ``table`` and ``cells``."""
    return _TEMPLATES.get_template(f"{template}.md.jinja").render(values)


def replace_sections(page: Path, sections: dict[str, str]) -> None:
    """Write texts into a page, each between ``<!-- NAME: ... -->`` and ``<!-- /NAME -->``."""
    text = page.read_text(encoding="utf-8")
    for name, section in sections.items():
        begin, end = re.search(f"<!-- {name}: .* -->", text), f"<!-- /{name} -->"
        if begin is None or end not in text:
            raise SystemExit(f"error: {page}: lacks the markers <!-- {name}: ... --> and {end}")
        after = text.index(end, begin.end())
        text = f"{text[: begin.end()]}\n\n{section}\n\n{text[after:]}"
    page.write_text(text, encoding="utf-8")


def parser(description: str | None, **defaults: Path) -> argparse.ArgumentParser:
    """Return a generator's parser, with an option for each of the paths that have defaults."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, path in defaults.items():
        made.add_argument(f"--{name}", type=Path, default=path, help="default: %(default)s")
    return made
