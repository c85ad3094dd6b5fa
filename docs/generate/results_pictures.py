"""Pictures of docs/results.md: perplexity of the longer runs; speed and loss gap of each recipe."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, ScalarFormatter

from megatron_lowbit.analysis.loss_curve import colors

OWN = "Megatron-LM "
"""Names of precisions of Megatron-LM begin with it."""
_SHOWN_FROM = 1 / 5
"""Share of the tokens without perplexities: early ones are many times as large as the last."""
_FOR_TEXT = 0.8
"""Room to the right of the bars for their figures, as a share of what the bars take."""


def is_own(precision: str) -> bool:
    """Return whether a precision is one of Megatron-LM's own."""
    return precision.startswith(OWN)


def with_loss_of(precision: str, base: str) -> str:
    """Return the name of another precision with the loss of a precision, which follows a comma."""
    _, comma, loss = precision.partition(", ")
    return base + comma + loss


def draw_curves(runs: Sequence[dict], file: Path) -> None:
    """Draw validation perplexity by tokens and by minutes of training, a color per name."""
    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
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
    for panel in (left, right):
        panel.grid(alpha=0.3)
    right.legend()
    figure.savefig(file)


def draw_summary(
    speeds: Mapping[str, Mapping[str, int]],
    gaps: Mapping[str, tuple[float, float]],
    bases: Sequence[str],
    file: Path,
) -> None:
    """Draw tokens/s of each precision in each model, and to the right the loss gaps, if any.

    Megatron-LM's own precisions are gray and have no gaps.

    Args:
        speeds: tokens/s by model and precision.
        gaps: relative gaps by recipe, with their standard errors; other recipes are marked as not
            measured.
        bases: precisions that others of the same loss are compared with, where a model has them.
        file: the PNG file.
    """
    names = list(dict.fromkeys([*(name for own in speeds.values() for name in own), *gaps]))
    size = 2.6 + 3.2 * (len(speeds) + bool(gaps)), 1.3 + 0.42 * len(names)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = figure.subplots(1, len(speeds) + bool(gaps), sharey=True, squeeze=False)[0]
    for panel, (model, own) in zip(panels, speeds.items(), strict=False):
        panel.set_title(model)
        _draw_speeds(panel, names, own, [base for base in bases if base in own])
    panels[0].invert_yaxis()
    if gaps:
        _draw_gaps(panels[-1], [name for name in names if not is_own(name)], gaps)
    figure.savefig(file)


def _draw_speeds(
    panel: Axes, names: Sequence[str], speeds: Mapping[str, int], bases: Sequence[str]
) -> None:
    shades = ["0.6" if is_own(name) else "#4c72b0" for name in names]
    panel.barh(names, [speeds.get(name, 0) for name in names], color=shades)
    for name in names:
        if name not in speeds:
            panel.annotate(" not measured", (0, name), va="center", color="0.4")
            continue
        others = [speeds.get(with_loss_of(name, base)) for base in bases]
        ratios = [f"{speeds[name] / other:.2f}×" if other else "–" for other in others]
        times = f" ({', '.join(ratios)})" if name not in bases[:1] else ""
        panel.annotate(f" {speeds[name]:,}{times}", (speeds[name], name), va="center")
    panel.set_xlim(0, (1 + _FOR_TEXT * max(1, len(bases))) * max(speeds.values()))
    ratios = [f"× {base.removeprefix(OWN)}" for base in bases]
    panel.set_xlabel(f"tokens/s ({', '.join(ratios)})" if bases else "tokens/s")
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_gaps(
    panel: Axes, recipes: Sequence[str], gaps: Mapping[str, tuple[float, float]]
) -> None:
    ends = [0.0]
    for name in recipes:
        if name not in gaps:
            panel.annotate(" not measured", (0, name), va="center", color="0.4")
            continue
        gap, error = (100 * value for value in gaps[name])
        if not math.isfinite(gap):
            panel.annotate(" diverged", (0, name), va="center")
        else:
            panel.barh(name, gap, xerr=error, color="#dd8452", ecolor="0.3", capsize=3)
            place = max(0, gap + error), name
            panel.annotate(f" {gap:+.2f}% ± {error:.2f}", place, va="center")
            ends += [gap - error, gap + error]
    panel.axvline(0, color="black", linewidth=0.8)
    taken = (max(ends) - min(ends)) or 0.01
    panel.set_xlim(min(ends) - 0.1 * taken, max(ends) + _FOR_TEXT * taken)
    panel.set_xlabel("gap to BF16's loss (%)")
