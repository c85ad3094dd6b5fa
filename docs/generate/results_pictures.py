"""Pictures of docs/results.md and README: speed of whole steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

OWN = "Megatron-LM "
"""Names of precisions of Megatron-LM begin with it."""
_FOR_TEXT = 1.1
"""Room to the right of the bars for their figures, as a share of what the bars take."""


def is_own(precision: str) -> bool:
    """Return True for a precision of Megatron-LM, False for a recipe."""
    return precision.startswith(OWN)


class Bars(NamedTuple):
    """Tokens/s on a GPU and ratios, both by precision."""

    gpu: str
    speeds: dict[str, int]
    ratios: dict[str, list[float | None]]


def draw_steps(panels: Sequence[Bars], headings: Sequence[str], file: Path) -> None:
    """Draw tokens/s of each precision, a panel for each GPU; Megatron-LM's own are gray.

    Args:
        panels: at least one; what one lacks of another's precisions is marked as not measured.
        headings: names of the ratios.
        file: the PNG file.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.speeds))
    size = 3.2 + 4 * len(panels), 1.1 + 0.34 * len(names)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_speeds(axis, names, panel)
    axes[0].invert_yaxis()
    figure.supxlabel(f"tokens/s ({', '.join(headings)})", fontsize="medium")
    figure.savefig(file)


def _draw_speeds(axis: Axes, names: Sequence[str], panel: Bars) -> None:
    shades = ["0.6" if is_own(name) else "#4c72b0" for name in names]
    axis.set_title(panel.gpu)
    axis.barh(names, [panel.speeds.get(name, 0) for name in names], color=shades)
    for name in names:
        if (speed := panel.speeds.get(name)) is None:
            axis.annotate(" not measured", (0, name), va="center", color="0.4")
            continue
        ratios = ", ".join(f"{x:.2f}×" if x else "–" for x in panel.ratios[name])
        axis.annotate(f" {speed:,} ({ratios})", (speed, name), va="center")
    axis.set_xlim(0, (1 + _FOR_TEXT) * max(panel.speeds.values()))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
