"""Closeness of MXNorm's estimate of the RMS to RMSNorm, by number of blocks; its constants.

    python -m benchmarks mxnorm_fidelity

Gaussian rows, MXFP8 blocks of 32, scales rounded up. r2 is 1 - sum((MXNorm - RMSNorm)**2) /
sum(RMSNorm**2), of the normalized values before the cast and of what their codes stand for: figure
3 of "MXNorm" (arXiv 2603.13180). Writes benchmarks/results/mxnorm_fidelity.json and
docs/images/mxnorm_fidelity.png.
"""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import records
from megatron_lowbit.numerics import Quantizer, format_by_name
from megatron_lowbit.numerics.mxnorm import MXNorm, absmax_constant

RESULT = records.RESULTS / "mxnorm_fidelity.json"
PICTURE = records.ROOT / "docs" / "images" / "mxnorm_fidelity.png"
BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512)
BLOCK, ELEMENTS, SEED = 32, 2**22, 1234
QUANTIZE = Quantizer(format_by_name("mxfp8-e4m3", scale_rounding="rceil"))


def fidelity(blocks: int, p: float) -> dict[str, float]:
    """Return r2 of both kinds, over rows of so many blocks."""
    generator = torch.Generator().manual_seed(SEED)
    columns = BLOCK * blocks
    x = torch.randn(ELEMENTS // columns, columns, generator=generator)
    exact = (x.double() / x.double().square().mean(-1, keepdim=True).sqrt()).float()
    seen = MXNorm(p=p, eps=0).normalize(x, BLOCK)
    quantized = [QUANTIZE(values).dequantize() for values in (seen, exact)]
    return {"before the cast": _r2(seen, exact), "dequantized": _r2(*quantized)}


def _r2(seen: Tensor, exact: Tensor) -> float:
    seen, exact = seen.double(), exact.double()
    return float(1 - (seen - exact).square().sum() / exact.square().sum())


def draw(rows: list[dict]) -> None:
    """Return 1 - r2 over the number of blocks."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for p, marker in ((2, "o"), (1, "x")):
        for moment, style in (("before the cast", "-"), ("dequantized", "--")):
            mine = [row for row in rows if row["p"] == p]
            axes.plot(
                [row["blocks"] for row in mine], [1 - row[moment] for row in mine],
                marker=marker, linestyle=style, label=f"p = {p}, {moment}",
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="blocks of 32 in a row", ylabel="1 - r²")
    axes.set_xticks(BLOCKS, map(str, BLOCKS))
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Print both tables, write the JSON and the picture."""
    records.parser(__doc__).parse_args(argv)
    console = Console(width=100)
    constants = Table("p", "B = 16", "32", "64", "128", title="c(p, B)")
    for p in (1, 2):
        constants.add_row(str(p), *(f"{absmax_constant(p, b):.6f}" for b in (16, 32, 64, 128)))
    console.print(constants)
    rows = [{"blocks": n, "p": p} | fidelity(n, p) for p in (2, 1) for n in BLOCKS]
    shown = Table("p", "blocks", "r2 before the cast", "r2 dequantized")
    for row in rows:
        values = (f"{row[moment]:.5f}" for moment in ("before the cast", "dequantized"))
        shown.add_row(str(row["p"]), str(row["blocks"]), *values)
    console.print(shown)
    head = {"block": BLOCK, "elements": ELEMENTS, "seed": SEED}
    records.write(RESULT, head, rows=rows)
    draw(rows)
