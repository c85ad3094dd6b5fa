"""A comparison of runs as a table, and as a page that needs no other file."""

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path

import jinja2
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from rich.table import Table

from megatron_lowbit.analysis.comparison import (
    FINAL_SHARE,
    Contender,
    GapCurve,
    Row,
    compare,
    gap_curves,
    visible_gap,
)
from megatron_lowbit.analysis.loss_curve import colors, save_png, smooth
from megatron_lowbit.folders import replace_text, replacing

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
from the last validation, with the standard deviation over seeds. The picture has the gaps over
training, from means over {{ share }}% of the iterations before each point; bands are one standard
error.</p>
<table><tr>{% for head in columns %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<p>{{ notes }}</p>
<img alt="losses and gaps over tokens" src="data:image/png;base64,{{ picture }}">
</html>
"""


def table(contenders: Sequence[Contender]) -> Table:
    """Build the table for a terminal."""
    headings, cells, notes = _cells(compare(contenders))
    comparison = Table(*headings, caption=notes, caption_justify="left")
    for row in cells:
        comparison.add_row(*row)
    return comparison


def write_page(contenders: Sequence[Contender], directory: Path, title: str) -> None:
    """Write ``comparison.png`` and ``comparison.html`` into a folder."""
    directory.mkdir(parents=True, exist_ok=True)
    image = picture(contenders)
    headings, cells, notes = _cells(compare(contenders))
    with replacing(directory / "comparison.png") as file:
        file.write(image)
    text = jinja2.Environment(autoescape=True).from_string(_PAGE).render(
        title=title, share=round(100 * FINAL_SHARE), columns=headings, rows=cells, notes=notes,
        picture=base64.b64encode(image).decode(),
    )  # fmt: skip
    replace_text(directory / "comparison.html", text)


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], str]:
    """Return the headings and cells of the table, and the sentences below it."""
    headings = ["", "seeds", "final loss", f"gap to {rows[0].name}", "perplexity", "spike score",
                "tokens/s"]  # fmt: skip
    cells = [
        [
            row.name,
            str(row.seeds),
            f"{row.loss:.4f}" + _known(row.loss_spread, ".4f", " ± "),
            gap_text(row),
            _known(row.perplexity, ".3f") + _known(row.perplexity_spread, ".3f", " ± "),
            _known(row.spikes, ".1f"),
            _known(row.speed, ",.0f"),
        ]
        for row in rows
    ]
    notes = [_power(rows)]
    known = rows if math.isfinite(rows[0].loss) else ()
    if any(math.isnan(row.gap) and math.isfinite(row.loss) for row in known):
        notes.append(f"Rows without a gap have runs of other lengths than {rows[0].name}.")
    return headings, cells, " ".join(filter(None, notes))


def _power(rows: Sequence[Row]) -> str:
    """Return a sentence on the gaps that these and more seeds detect; none without noise."""
    known = [row for row in rows[1:] if row.gap_error > 0]
    if not known:
        return ""
    row = max(known, key=lambda row: row.pairs)
    counts = row.pairs, 2 * row.pairs, 4 * row.pairs
    gaps = ", ".join(
        f"{100 * visible_gap(row.gap_error, row.pairs, count):.2g}% with {count}"
        for count in counts
    )
    return f"Smallest gaps that are detected with a power of 80%: {gaps} seeds."


def _known(value: float, form: str, before: str = "") -> str:
    """Format a number after a text; return an empty text for NaN."""
    return "" if math.isnan(value) else f"{before}{value:{form}}"


_PANELS = 4


def picture(contenders: Sequence[Contender], share: float = FINAL_SHARE) -> bytes:
    """Draw a comparison as a PNG, with final losses over ``share`` of a run.

    Up to eight names are colors of two panels: losses of all seeds, and gaps to the first name.
    More have a panel each, only of their gaps.
    """
    rows, curves = compare(contenders, share), gap_curves(contenders, share)
    if len(contenders) <= 8:
        figure = _draw_in_colors(contenders, rows, curves)
    else:
        figure = _draw_in_panels(rows, curves)
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    save_png(figure, file)
    return file.getvalue()


def gap_text(row: Row) -> str:
    """Format a row's gap in percent, with its standard error if it is known."""
    if math.isnan(row.loss):
        return "diverged"
    if math.isnan(row.gap):
        return "none"
    error = "" if math.isnan(row.gap_error) else f" ± {100 * row.gap_error:.2f}"
    return f"{100 * row.gap:+.2f}%{error}"


def gaps_text(rows: Sequence[Row]) -> str:
    """Format the gaps of all names to the first one in a line."""
    return ", ".join(
        f"{row.name} {gap_text(row)} ({row.seeds} seed{'s' * (row.seeds > 1)})" for row in rows[1:]
    )


def _draw_in_colors(
    contenders: Sequence[Contender], rows: Sequence[Row], gaps: Sequence[GapCurve]
) -> Figure:
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    shades = colors(len(contenders))
    named = {}
    for contender, color in zip(contenders, shades, strict=True):
        for curve in contender.curves:
            losses = smooth(curve.losses, max(1, round(len(curve.losses) / 30)))
            (named[contender.name],) = above.plot(curve.tokens, losses, color=color, linewidth=1)
    below.axhline(0, color=shades[0], linewidth=1)
    named_gaps = {
        f"{row.name}: {gap_text(row)}": _draw_gap(below, _shown(gap), color)
        for row, gap, color in list(zip(rows, gaps, shades, strict=True))[1:]
    }
    above.set_ylabel("loss (nats per token)")
    below.set_ylabel(f"gap to {rows[0].name} (%), ± standard error")
    below.set_xlabel("tokens")
    below.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in (above, below):
        panel.grid(alpha=0.3)
    above.legend(named.values(), named)
    if named_gaps:
        below.legend(named_gaps.values(), named_gaps)
    return figure


def _draw_in_panels(rows: Sequence[Row], gaps: Sequence[GapCurve]) -> Figure:
    lines = math.ceil((len(rows) - 1) / _PANELS)
    figure = Figure(figsize=(11, 0.8 + 1.9 * lines), dpi=110, layout="constrained")
    panels = list(figure.subplots(lines, _PANELS, sharex=True, sharey=True, squeeze=False).flat)
    for panel, row, gap in zip(panels, rows[1:], gaps[1:], strict=False):
        for other in map(_shown, gaps[1:]):
            panel.plot(other.tokens, other.gap, color="0.85", linewidth=0.7)
        panel.axhline(0, color="black", linewidth=0.8)
        _draw_gap(panel, _shown(gap), "tab:blue")
        panel.set_title(f"{row.name}\n{gap_text(row)}", fontsize=9)
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in panels[len(rows) - 1 :]:
        panel.set_axis_off()
    for panel in panels[len(rows) - 1 - _PANELS : len(rows) - 1]:
        panel.tick_params(labelbottom=True)  # also where the panel below it is empty
    figure.supxlabel("tokens")
    figure.supylabel(f"gap to {rows[0].name} (%), ± standard error; grey: the others")
    return figure


def _draw_gap(panel: Axes, curve: GapCurve, color: object) -> Line2D:
    """Draw a gap by tokens, with a band of its standard error; return the gap's line."""
    tokens, gap, error = curve
    panel.fill_between(tokens, gap - error, gap + error, color=color, alpha=0.15, linewidth=0)
    return panel.plot(tokens, gap, color=color, linewidth=1.5)[0]


def _shown(curve: GapCurve) -> GapCurve:
    """Return the part of a curve that is drawn, in percent."""
    start = len(curve.tokens) // 5  # Early gaps are many times as large as those in the end.
    return GapCurve(curve.tokens[start:], 100 * curve.gap[start:], 100 * curve.error[start:])
