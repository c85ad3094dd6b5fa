"""Pictures of docs/results.md and README: speed of whole steps; perplexity of the longer runs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, ScalarFormatter

from megatron_lowbit.analysis.comparison import GapCurve, gaps
from megatron_lowbit.analysis.comparison_page import draw_gap
from megatron_lowbit.analysis.loss_curve import colors

OWN = "Megatron-LM "
"""Names of precisions of Megatron-LM begin with it."""
_SHOWN_FROM = 1 / 5
"""Share of the tokens without perplexities: early ones are many times as large as the last."""
_FOR_TEXT = 1.1
"""Room to the right of the bars for their figures, as a share of what the bars take."""


def is_own(precision: str) -> bool:
    """Return True for a precision of Megatron-LM, False for a recipe."""
    return precision.startswith(OWN)


def draw_curves(runs: Sequence[dict], file: Path) -> None:
    """Draw validation perplexity by tokens and by minutes, and gaps by tokens, a color per name."""
    figure = Figure(figsize=(12, 4.5), dpi=120, layout="constrained")
    left, right, gap_panel = figure.subplots(1, 3)
    right.sharey(left)
    names = list(dict.fromkeys(run["name"] for run in runs))
    shades = dict(zip(names, colors(len(names)), strict=True))
    seen: set[str] = set()
    for run in runs:
        shown = [(t, x) for t, x in run["validation"] if t >= _SHOWN_FROM * run["tokens"]]
        tokens, perplexities = [t for t, _ in shown], [math.exp(x) for _, x in shown]
        minutes = [t / run["tokens_per_s"] / 60 for t in tokens]
        style = {"color": shades[run["name"]], "marker": "o", "markersize": 3, "linewidth": 1.2}
        left.plot(tokens, perplexities, **style)
        label = None if run["name"] in seen else run["name"]
        right.plot(minutes, perplexities, label=label, **style)
        seen.add(run["name"])
    left.set_ylabel("validation perplexity")
    left.set_yscale("log", base=2)  # gaps between late perplexities show beside early ones
    left.yaxis.set_major_formatter(ScalarFormatter())
    left.set_xlabel("tokens")
    left.xaxis.set_major_formatter(EngFormatter(sep=""))
    right.set_xlabel("minutes of training on one GPU")
    losses = [[[x for _, x in run["validation"]] for run in runs if run["name"] == name]
              for name in names]  # fmt: skip
    tokens = np.array([t for t, _ in runs[0]["validation"]])
    late = tokens >= _SHOWN_FROM * runs[0]["tokens"]
    for name, (gap, error) in zip(names, gaps(losses), strict=True):
        curve = GapCurve(tokens[late], 100 * gap[late], 100 * error[late])
        draw_gap(gap_panel, curve, shades[name])
    gap_panel.set_ylabel(f"gap of the validation loss to {names[0]} (%)")
    gap_panel.set_xlabel("tokens")
    gap_panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in (left, right, gap_panel):
        panel.grid(alpha=0.3)
    right.legend()
    figure.savefig(file)


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
