"""Loss curves of one or several runs as a picture."""

from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.folders import replacing
from megatron_lowbit.json_files import Entries, as_object, parse_json


class LossCurve(NamedTuple):
    """Training and validation losses (float64, NaN where the run had none) by iteration.

    ``tokens`` and ``speeds``, in tokens/s, belong to ``iterations``; NaN where a run has none.
    """

    iterations: np.ndarray
    losses: np.ndarray
    validation_iterations: np.ndarray
    validation_losses: np.ndarray
    tokens: np.ndarray
    speeds: np.ndarray


def read_losses(path: Path) -> LossCurve:
    """Read a metrics.jsonl, except a last line that a run is still writing.

    Raises UserError for a missing, malformed or lossless file.
    """
    columns: dict[str, list[float]] = {name: [] for name in LossCurve._fields}
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read as metrics.jsonl ({error.strerror})") from None
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    for number, line in enumerate(lines, start=1):
        location = f"{path}:{number}"
        record = as_object(parse_json(line, location), location)
        entries = Entries(record, location)
        for loss, prefix in (("lm_loss", ""), ("validation_loss", "validation_")):
            if loss in record:
                columns[f"{prefix}losses"].append(entries.number(loss, np.nan))
                columns[f"{prefix}iterations"].append(entries.integer("iteration", minimum=0))
        if "lm_loss" in record:
            columns["tokens"].append(entries.number("consumed_tokens", np.nan) or np.nan)
            columns["speeds"].append(entries.number("tokens_per_second", np.nan) or np.nan)
    require(bool(columns["losses"]), f"{path}: holds no lm_loss")
    return LossCurve(**{name: np.array(values) for name, values in columns.items()})


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Smooth by a centred average of ``window`` values, fewer at the ends, without NaN values."""
    if not len(values):
        return values  # np.convolve refuses them
    valid = np.isfinite(values)
    kernel = np.ones(min(window, len(values)))
    total = np.convolve(np.where(valid, values, 0.0), kernel, mode="same")
    count = np.convolve(valid.astype(float), kernel, mode="same")
    # A convolution leaves rounding dust in the counts, so compare with one half, not with zero.
    means = np.full(len(total), np.nan)
    np.divide(total, count, out=means, where=count > 0.5)
    return means


def recent_means(values: np.ndarray, window: int) -> np.ndarray:
    """Average each value with those before it, ``window`` in all; NaN with one that is NaN."""
    kernel = np.ones(min(window, len(values)))
    total = np.convolve(values, kernel)[: len(values)]
    return total / np.minimum(np.arange(1, len(values) + 1), len(kernel))


def relative_gap(run: LossCurve, reference: LossCurve) -> tuple[np.ndarray, np.ndarray]:
    """Return the iterations that both runs logged, and ``run``'s loss over ``reference``'s - 1."""
    common, ours, theirs = np.intersect1d(run.iterations, reference.iterations, return_indices=True)
    return common, run.losses[ours] / reference.losses[theirs] - 1


def plot_loss(runs: dict[str, Path], output: Path) -> None:
    """Draw the losses of ``runs`` (name to metrics.jsonl) into the PNG file ``output``.

    Each run has a thin line (as logged), a thick one (smoothed) and validation points; with
    several runs a lower panel has their smoothed relative gap to the first. Raises UserError for
    an unreadable run or an output that is not named .png.
    """
    require(output.suffix == ".png", f"--output {output}: the name must end in .png")
    curves = {name: read_losses(Path(path)) for name, path in runs.items()}
    require(bool(curves), "give at least one metrics.jsonl")
    first, reference = next(iter(curves.items()))
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [3, 1][: len(curves)]
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    above, below = grid[0, 0], grid[-1, 0]
    named: dict[str, Line2D] = {}
    for (name, curve), color in zip(curves.items(), colors(len(curves)), strict=True):
        named |= _draw_losses(above, name, curve, color)
        if below is not above:
            iterations, gap = relative_gap(curve, reference)
            below.plot(iterations, 100 * smooth(gap, _window(gap)), color=color)
            below.set_ylabel(f"gap to {first} (%)")
    above.set_ylabel("loss (nats per token)")
    above.legend(named.values(), named)
    for panel in grid[:, 0]:
        panel.grid(alpha=0.3)
    below.set_xlabel("training step (iteration)")
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as file:
        save_png(figure, file)


def save_png(figure: Figure, file: BinaryIO) -> None:
    """Save a figure with text between dollar signs as it is, which matplotlib would typeset."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    figure.savefig(file, format="png")


def _draw_losses(panel: Axes, name: str, curve: LossCurve, color: Any) -> dict[str, Line2D]:
    """Draw a run; return the entries of the legend.

    The lines have no labels, because matplotlib ignores labels that begin with ``_``.
    """
    panel.plot(curve.iterations, curve.losses, color=color, linewidth=0.6, alpha=0.4)
    smoothed = smooth(curve.losses, _window(curve.losses))
    named = {name: panel.plot(curve.iterations, smoothed, color=color, linewidth=2)[0]}
    if len(curve.validation_iterations):
        (named[f"{name}, validation"],) = panel.plot(
            curve.validation_iterations, curve.validation_losses, "o", color=color,
            markeredgecolor="black",
        )  # fmt: skip
    return named


def _window(values: np.ndarray) -> int:
    # A fiftieth of the logged iterations; odd, so that the average is centred.
    return 2 * (len(values) // 100) + 1


def colors(number: int) -> list[Any]:
    """Return ``number`` distinguishable colors, as RGBA arrays."""
    fits_tab10 = number <= 10
    positions = np.arange(number) if fits_tab10 else np.linspace(0, 1, number)
    return list(matplotlib.colormaps["tab10" if fits_tab10 else "turbo"](positions))
