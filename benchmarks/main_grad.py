"""Cost of adding a weight's gradient to an FP32 main gradient, inside the GEMM that computes it.

    python benchmarks/main_grad.py --sweep

Products of dY's transpose (N, tokens) and X's transpose (K, tokens) in BF16 and in FP8 with a scale
a tensor: written in BF16, written in FP32, added to FP32, and added to zeros that a scalar in
device memory tells the GEMM not to read. The layers are Llama-3-8B's. An element of the product
moves 2 bytes if it is written in BF16, 4 in FP32, and 8 if it is added. The bound is the product's
FLOPs at the rate of a large GEMM, or those bytes at the rate of a copy if they take longer.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import timing
import torch
from rich.table import Table
from timing import Ceilings

from megatron_lowbit.kernels.cublas import scaled_matmul


class Size(NamedTuple):
    """Size of a product: dW (outputs, inputs) of so many tokens."""

    tokens: int
    outputs: int
    inputs: int


SIZES = [
    Size(tokens, outputs, inputs)
    for tokens in (4096, 8192, 16384)
    for outputs, inputs in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
]
GEMMS = {"BF16": "bf16", "FP8": "fp8 per tensor"}
WAYS = {"written in BF16": 2, "written": 4, "added": 8, "added to zeros": 4}
"""Bytes that an element of the product moves."""
CONTENDERS = {f"{name}, {way}": (name, way) for name in GEMMS for way in WAYS}


def product(size: Size, name: str, way: str) -> timing.Step:
    """Return a step that computes the product in one way."""
    device = timing.device()
    dtypes = {"BF16": (torch.bfloat16,) * 2, "FP8": (torch.float8_e5m2, torch.float8_e4m3fn)}[name]
    shape = size.outputs, size.inputs
    lhs, rhs = (
        torch.randn(count, size.tokens, device=device).to(dtype)
        for count, dtype in zip(shape, dtypes, strict=True)
    )
    out_dtype = torch.bfloat16 if way == "written in BF16" else torch.float32
    out = torch.zeros(shape, dtype=out_dtype, device=device)
    factor = torch.ones((), device=device)
    beta = {"added": True, "added to zeros": torch.zeros((), device=device)}.get(way, False)
    return lambda mark: scaled_matmul(lhs, rhs, factor, out_dtype, out, beta)


def run(size: Size, names: Sequence[str], limits: Ceilings, seconds: float) -> list[dict]:
    """Measure one size."""
    builders = {name: partial(product, size, *CONTENDERS[name]) for name in names}
    steps, refused = timing.build(builders)
    rows, elements = [], size.outputs * size.inputs
    for name, laps in timing.measure(steps, seconds).items():
        gemm, way = CONTENDERS[name]
        row = {"size": size, "contender": name, **timing.spread(sum(lap) for lap in laps)}
        least = limits.seconds(2 * size.tokens * elements, GEMMS[gemm])
        if least is not None:
            row["bound_ms"] = round(1e3 * max(least, WAYS[way] * elements / limits.copy), 4)
        rows.append(row)
    return rows + [
        {"size": size, "contender": name, "refused": why} for name, why in refused.items()
    ]


def table(rows: Sequence[dict]) -> Table:
    """Tabulate milliseconds, and the bound."""
    shown = Table(title=str(rows[0]["size"]))
    for heading in ("product", "ms", "bound"):
        shown.add_column(heading)
    for row in rows:
        time = row.get("refused") or f"{row['median_ms']:.4f}"
        shown.add_row(row["contender"], time, str(row.get("bound_ms", "")))
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    form = "TOKENSxOUTPUTSxINPUTS"
    timing.over_sizes("main_grad", __doc__, argv, CONTENDERS, SIZES, form, run, table)


if __name__ == "__main__":
    main()
