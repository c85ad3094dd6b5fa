"""Parts of pages: tables, templates of docs/templates, sections between two markers."""

import re
import shlex
import sys
import textwrap
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

sys.path.insert(0, str(Path(__file__).parents[2]))  # generators import what benchmarks declare

# isort: split
from benchmarks.records import RESULTS as RESULTS
from benchmarks.records import ROOT
from benchmarks.records import markdown as table
from benchmarks.records import parser as parser

_TEMPLATES = Environment(
    loader=FileSystemLoader(ROOT / "docs" / "templates"), undefined=StrictUndefined,
    keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.globals |= {"table": table}
_TEMPLATES.filters |= {"shell": shlex.join, "shorten": partial(textwrap.shorten, width=100)}


def recipe_section(name: str) -> str | None:
    """Return the page and section of a recipe, relative to docs/recipes; None without one."""
    for page in sorted((ROOT / "docs" / "recipes").glob("*.md")):
        if re.search(rf"^##+ `{re.escape(name)}`$", page.read_text(encoding="utf-8"), re.MULTILINE):
            return f"{page.name}#{name}"
    return None


def render(template: str, **values: object) -> str:
    """Return the text of a template of docs/templates."""
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
