"""Parts of pages that scripts write: tables, and sections between two markers."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


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
