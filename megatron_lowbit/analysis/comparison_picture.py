"""Picture of a comparison of runs: losses, and gaps with their standard errors, by tokens."""

import io
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from megatron_lowbit.analysis.comparison import Contender, GapCurve, Row, compare, gap_curves
from megatron_lowbit.analysis.loss_curve import colors, smooth

MOST_COLORS = 8
"""Most names in one panel, whose colors a reader can tell apart."""
SMOOTHED = 1 / 30
"""Share of the logged iterations that losses are smoothed over."""
SHOWN_FROM = 1 / 5
"""Share of the iterations without gaps: early ones are many times as large as those in the end."""
_COLUMNS = 4


def picture(contenders: Sequence[Contender]) -> bytes:
    """Draw a comparison as a PNG.

    Up to eight names are colors of two panels: losses of all seeds, and gaps to the first name.
    More have a panel each, of their gaps alone.
    """
    rows, curves = compare(contenders), gap_curves(contenders)
    if len(contenders) <= MOST_COLORS:
        figure = _draw_in_colors(contenders, rows, curves)
    else:
        figure = _draw_in_panels(rows, curves)
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def gap_text(row: Row) -> str:
    """Format a row's gap in percent, with its standard error if it is known."""
    error = "" if math.isnan(row.gap_error) else f" ± {100 * row.gap_error:.2f}"
    return f"{100 * row.gap:+.2f}%{error}"


def _draw_in_colors(
    contenders: Sequence[Contender], rows: Sequence[Row], gaps: Sequence[GapCurve]
) -> Figure:
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    shades = colors(len(contenders))
    for contender, color in zip(contenders, shades, strict=True):
        for number, curve in enumerate(contender.curves):
            losses = smooth(curve.losses, max(1, round(len(curve.losses) * SMOOTHED)))
            label = None if number else contender.name
            above.plot(curve.tokens, losses, color=color, linewidth=1, label=label)
    below.axhline(0, color=shades[0], linewidth=1)
    for row, gap, color in list(zip(rows, gaps, shades, strict=True))[1:]:
        _draw_gap(below, gap, color, label=f"{row.name}: {gap_text(row)}")
    above.set_ylabel("loss (nats per token)")
    below.set_ylabel(f"gap to {rows[0].name} (%), ± standard error")
    below.set_xlabel("tokens")
    below.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in (above, below):
        panel.grid(alpha=0.3)
    above.legend()
    if len(rows) > 1:
        below.legend()
    return figure


def _draw_in_panels(rows: Sequence[Row], gaps: Sequence[GapCurve]) -> Figure:
    lines = math.ceil((len(rows) - 1) / _COLUMNS)
    figure = Figure(figsize=(11, 0.8 + 1.9 * lines), dpi=110, layout="constrained")
    panels = list(figure.subplots(lines, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    for panel, row, gap in zip(panels, rows[1:], gaps[1:], strict=False):
        for other in map(_shown, gaps[1:]):
            panel.plot(other.tokens, other.gap, color="0.85", linewidth=0.7)
        panel.axhline(0, color="black", linewidth=0.8)
        _draw_gap(panel, gap, "tab:blue")
        panel.set_title(f"{row.name}\n{gap_text(row)}", fontsize=9)
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in panels[len(rows) - 1 :]:
        panel.set_axis_off()
    for panel in panels[len(rows) - 1 - _COLUMNS : len(rows) - 1]:
        panel.tick_params(labelbottom=True)  # also where the panel below it is empty
    figure.supxlabel("tokens")
    figure.supylabel(f"gap to {rows[0].name} (%), ± standard error; grey: the others")
    return figure


def _draw_gap(panel: Axes, curve: GapCurve, color: object, label: str | None = None) -> None:
    tokens, gap, error = _shown(curve)
    panel.plot(tokens, gap, color=color, linewidth=1.5, label=label)
    panel.fill_between(tokens, gap - error, gap + error, color=color, alpha=0.15, linewidth=0)


def _shown(curve: GapCurve) -> GapCurve:
    """Return the part of a curve that is drawn, in percent."""
    start = int(len(curve.tokens) * SHOWN_FROM)
    return GapCurve(curve.tokens[start:], 100 * curve.gap[start:], 100 * curve.error[start:])
