"""Variance of a stochastically rounded MXFP4 product, with and without a random Hadamard transform.

    python -m benchmarks rht_variance

Reproduces figure 2 of "Training LLMs with MXFP4" (arXiv 2502.20586): the mean over pairs of vectors
(A, B) of the variance over stochastic rounding of Q(A)^T Q(B), against Q(HSA)^T Q(HSB). Elements
are N(0, 1), a share p of them N(0, deviation**2); Q is algorithm 2. Two ways of scaling: one scale
for the whole vector, as theorem 3.2 has it, and MX blocks of 32, as training has it. Writes
benchmarks/results/rht_variance.json and docs/images/rht_variance.png.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks import records
from megatron_lowbit.kernels import compiled
from megatron_lowbit.numerics import (
    Draw,
    Hadamard,
    Quantizer,
    Request,
    Rounding,
    derive_key,
    format_by_name,
    hadamard_transform,
)  # fmt: skip
from megatron_lowbit.numerics.hadamard import MAX_SIZE
from megatron_lowbit.numerics.quantizer import REFERENCE

RESULT = records.RESULTS / "rht_variance.json"
PICTURE = records.ROOT / "docs" / "images" / "rht_variance.png"
ALGORITHM_2 = format_by_name("mxfp4", scale_rounding="floor", three_quarters=True)
BLOCK = ALGORITHM_2.block
SIZES = (32, 64, 128, 256, 512, 1024, 2048)
OUTLIERS = (0.0, 0.001, 0.01)
DEVIATIONS = (5.0, 5.0**0.5)
"""The paper's "N(0, 5I)" read as a deviation and as a variance of 5."""
PAIRS, DRAWS, SEED = 4096, 4, 1234
"""Pairs of vectors, and roundings of each."""

_CHUNK = 1 << 20  # elements quantized at a time
_NO_COMPILER = compiled.missing_compiler()
_ARITHMETIC = REFERENCE if _NO_COMPILER else compiled.FUSED


class Case(NamedTuple):
    """Distribution of elements: a share ``outliers`` of them from N(0, deviation**2)."""

    outliers: float
    deviation: float

    def draw(self, size: int) -> tuple[Tensor, Tensor]:
        """Return A and B, (PAIRS, size) each: the same ones for every method."""
        key = derive_key(SEED, "data", str(self), size)
        random = torch.Generator().manual_seed(key >> 1)
        normal = torch.randn(2, PAIRS, size, generator=random)
        outlier = torch.rand(2, PAIRS, size, generator=random) < self.outliers
        a, b = torch.where(outlier, normal * self.deviation, normal)
        return a, b


class Method(NamedTuple):
    """Elements that share a scale, and points of the transform (0: none); None is the vector."""

    scale: int | None
    points: int | None

    @property
    def label(self) -> str:
        """For tables and pictures."""
        names = {0: "no RHT", None: "RHT, whole vector"}
        return names.get(self.points, f"RHT-{self.points}")


METHODS = (
    *(Method(None, points) for points in (0, None)),
    *(Method(BLOCK, points) for points in (0, 32, 64, 256, None)),
)


@dataclass
class Line:
    """Mean variance against vector size, for one case and method."""

    case: Case
    method: Method
    sizes: list[int] = field(default_factory=list)
    variance: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    bias_in_errors: list[float] = field(default_factory=list)

    def exponent(self) -> tuple[float, float]:
        """Return slope of log(variance) over log(size) by weighted least squares, and its error."""
        variance = np.array(self.variance)
        weights = variance / np.array(self.error)
        fit = np.polyfit(np.log(self.sizes), np.log(variance), 1, w=weights, cov="unscaled")
        return float(fit[0][0]), float(fit[1][0, 0]) ** 0.5

    def as_json(self) -> dict:
        """Return all of its figures, rounded to what their errors leave meaningful."""
        slope, error = self.exponent()
        return {
            **self.case._asdict(),
            "scale_of": self.method.scale or "vector",
            "rht": "vector" if self.method.points is None else self.method.points,
            "sizes": self.sizes,
            "variance": [float(f"{value:.5g}") for value in self.variance],
            "standard_error": [float(f"{value:.2g}") for value in self.error],
            "bias_in_standard_errors": [round(value, 2) for value in self.bias_in_errors],
            "exponent": round(slope, 4),
            "exponent_standard_error": round(error, 4),
        }


def transformed(x: Tensor, points: int, key: int) -> Tensor:
    """Compute HSx in blocks of ``points``; beyond 256, H_n is H_(n/256) (x) H_256."""
    if points <= MAX_SIZE:
        return hadamard_transform(x, Hadamard(points, "fresh", "fp32"), key)
    random = torch.Generator().manual_seed(key >> 1)
    x = x.unflatten(-1, (-1, points)) * torch.randint(2, (points,), generator=random).mul(2).sub(1)
    y = hadamard_transform(x, Hadamard(MAX_SIZE, "none", "fp32"))
    y = y.unflatten(-1, (-1, MAX_SIZE)).movedim(-1, -2)
    y = hadamard_transform(y, Hadamard(points // MAX_SIZE, "none", "fp32"))
    return y.movedim(-1, -2).flatten(-3)


def rounded(x: Tensor, scale: int | None, key: int) -> Tensor:
    """Return Q(x), dequantized, in blocks of 1x32 or one block of n x 32."""
    rows = 1 if scale else x.shape[1] // BLOCK
    quantizer = Quantizer(replace(ALGORITHM_2, block_rows=rows), Rounding.STOCHASTIC)
    blocks = x if scale else x.reshape(-1, BLOCK)
    parts = []
    for number, part in enumerate(blocks.split(_CHUNK // blocks.shape[1])):
        request = Request(quantizer, draw=Draw(derive_key(key, number)))
        made = request.quantize(part, arithmetic=_ARITHMETIC)
        parts.append(made.dequantize(_ARITHMETIC))
    return torch.cat(parts).view(x.shape)


def measure(line: Line, size: int) -> None:
    """Add one vector size to a line."""
    operands = line.case.draw(size)
    exact = (operands[0].double() * operands[1].double()).sum(1)
    key = derive_key(SEED, str(line.case), str(line.method), size)
    points = size if line.method.points is None else line.method.points
    if points:
        operands = tuple(transformed(x, points, derive_key(key, "signs")) for x in operands)
    products = []
    for draw in range(DRAWS):
        a, b = (
            rounded(x, line.method.scale, derive_key(key, draw, side)).double()
            for side, x in enumerate(operands)
        )
        products.append((a * b).sum(1))
    by_draw = torch.stack(products)
    variance, bias = by_draw.var(0), by_draw.mean(0) - exact
    line.sizes.append(size)
    line.variance.append(float(variance.mean()))
    line.error.append(float(variance.std() / math.sqrt(PAIRS)))
    line.bias_in_errors.append(float(bias.mean() / bias.std() * math.sqrt(PAIRS)))


def run(console: Console) -> list[Line]:
    """Return all lines, without vectors that are shorter than their transform."""
    # Without outliers their deviation makes no difference: once is enough.
    cases = [Case(p, deviation) for deviation in DEVIATIONS for p in OUTLIERS]
    cases.remove(Case(0.0, DEVIATIONS[1]))
    lines = [Line(case, method) for case in cases for method in METHODS]
    work = [(x, size) for x in lines for size in SIZES if (x.method.points or 0) <= size]
    for line, size in track(work, "measuring", console=console):
        measure(line, size)
    return lines


STYLES = {0: ("o", "C3"), None: ("s", "C0"), 32: ("v", "C1"), 64: ("^", "C2"), 256: ("D", "C4")}
"""Marker and color by the points of a method's transform."""


def draw_picture(lines: Sequence[Line]) -> None:
    """Draw variance over vector size, log-log: cases side by side, ways of scaling below."""
    deviation = lines[0].case.deviation
    cases = list(dict.fromkeys(x.case for x in lines if x.case.deviation == deviation))
    figure = Figure(figsize=(3.4 * len(cases), 6.4), layout="constrained")
    grid = figure.subplots(2, len(cases), sharex=True, sharey=True, squeeze=False)
    for row, scale in zip(grid, (None, BLOCK), strict=True):
        for axes, case in zip(row, cases, strict=True):
            shown = (line for line in lines if line.case == case and line.method.scale == scale)
            _draw_panel(axes, shown)
            axes.set_title(f"outliers p = {case.outliers:g}", fontsize=10)
        share = "one scale a vector" if scale is None else f"one scale for {scale} elements"
        row[0].set_ylabel(f"{share}\nvariance / b")
    for axes in grid[-1]:
        axes.set_xlabel("vector size b")
    figure.suptitle(f"MXFP4 product, stochastic rounding; outliers N(0, {deviation:g}²)")
    figure.savefig(PICTURE, dpi=100)


def _draw_panel(axes: Axes, lines: Iterator[Line]) -> None:
    for line in lines:
        marker, color = STYLES[line.method.points]
        variance, error = (
            [value / size for value, size in zip(values, line.sizes, strict=True)]
            for values in (line.variance, line.error)
        )
        label = f"{line.method.label}: b^{line.exponent()[0]:.2f}"
        style = {"marker": marker, "color": color, "markersize": 4, "linewidth": 1}
        axes.errorbar(line.sizes, variance, error, label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")


def table(lines: Sequence[Line]) -> Table:
    """Return the last size's variance per element and the growth exponent of every line."""
    size = lines[0].sizes[-1]
    result = Table("p", "deviation", "scale of", "transform", f"variance/b at {size}", "exponent")
    for line in lines:
        result.add_row(
            f"{line.case.outliers:g}", f"{line.case.deviation:.4g}",
            str(line.method.scale or "vector"), line.method.label,
            f"{line.variance[-1] / size:.4f} ± {line.error[-1] / size:.4f}",
            "{:.3f} ± {:.3f}".format(*line.exponent()),
        )  # fmt: skip
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON and the picture."""
    records.parser(__doc__).parse_args(argv)
    torch.set_num_threads(1)
    start, console = time.monotonic(), Console()
    lines = run(console)
    console.print(table(lines))
    arithmetic = f"reference: {_NO_COMPILER}" if _NO_COMPILER else "compiled"
    described = records.description(threads=torch.get_num_threads(), arithmetic=arithmetic)
    head = {"machine": described, "pairs": PAIRS, "draws": DRAWS, "seed": SEED}
    head["seconds"] = round(time.monotonic() - start)
    records.write(RESULT, head, lines=[line.as_json() for line in lines])
    draw_picture(lines)
    console.print(f"{RESULT}\n{PICTURE}")
