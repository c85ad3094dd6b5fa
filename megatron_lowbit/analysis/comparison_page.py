"""A comparison of runs as a table, and as a page that needs no other file."""

import base64
import math
from collections.abc import Sequence
from pathlib import Path

import jinja2
from rich.table import Table

from megatron_lowbit.analysis.comparison import (
    FINAL_SHARE,
    Contender,
    Row,
    compare,
    visible_gap,
)
from megatron_lowbit.analysis.comparison_picture import gap_text, picture
from megatron_lowbit.folders import replace_text, replacing

_COLUMNS = ("", "seeds", "final loss", "gap to {}", "perplexity", "spike score", "tokens/s")
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ccc }
td { text-align: right } td:first-child { text-align: left } img { max-width: 100% }
</style>
<h1>{{ title }}</h1>
<p>Final losses are means over the last {{ share }}% of the iterations, with the standard deviation
over seeds; gaps have their standard error, with the noise of all names pooled. Perplexities are
those of the last validation, with the standard deviation over seeds. Gaps of the picture are the
table's over training, from means over {{ share }}% of the iterations before each point; bands are
of one standard error.</p>
<table><tr>{% for head in columns %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<p>{{ power }}</p>
<img alt="losses and gaps over tokens" src="data:image/png;base64,{{ picture }}">
</html>
"""


def table(contenders: Sequence[Contender]) -> Table:
    """Build the table for a terminal."""
    rows = compare(contenders)
    shown = Table(*_heads(contenders), caption=_power(rows), caption_justify="left")
    for row in rows:
        shown.add_row(*_cells(row))
    return shown


def write_page(contenders: Sequence[Contender], directory: Path, title: str) -> None:
    """Write ``comparison.png`` and ``comparison.html`` into a folder."""
    directory.mkdir(parents=True, exist_ok=True)
    image, rows = picture(contenders), compare(contenders)
    with replacing(directory / "comparison.png") as file:
        file.write(image)
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    text = page.render(
        title=title,
        share=round(100 * FINAL_SHARE),
        columns=_heads(contenders),
        rows=[_cells(row) for row in rows],
        power=_power(rows),
        picture=base64.b64encode(image).decode(),
    )
    replace_text(directory / "comparison.html", text)


def _heads(contenders: Sequence[Contender]) -> list[str]:
    return [head.format(contenders[0].name) for head in _COLUMNS]


def _power(rows: Sequence[Row]) -> str:
    """Return a sentence on the gaps that so many seeds, and more, show; none without noise."""
    known = [row for row in rows[1:] if row.gap_error > 0]
    if not known:
        return ""
    row = max(known, key=lambda row: row.seeds)
    counts = row.seeds, 2 * row.seeds, 4 * row.seeds
    gaps = ", ".join(
        f"{100 * visible_gap(row.gap_error, row.seeds, count):.2g}% with {count}"
        for count in counts
    )
    return f"Gaps that show beyond two standard errors in four of five studies, by seeds: {gaps}."


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        str(row.seeds),
        f"{row.loss:.4f}" + _known(row.loss_spread, ".4f", " ± "),
        gap_text(row),
        _known(row.perplexity, ".3f") + _known(row.perplexity_spread, ".3f", " ± "),
        _known(row.spikes, ".1f"),
        _known(row.speed, ",.0f"),
    ]


def _known(value: float, form: str, before: str = "") -> str:
    """Format a number after a text; return an empty text for NaN."""
    return "" if math.isnan(value) else f"{before}{value:{form}}"
