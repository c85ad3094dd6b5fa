"""Cost of adding a weight's gradient to an FP32 main gradient, inside the GEMM that computes it.

    python benchmarks/main_grad.py --sweep

Products of dY's transpose (N, tokens) and X's transpose (K, tokens) in BF16 and in FP8 with a scale
a tensor: written in BF16, written in FP32, added to FP32, and added to zeros that the GEMM is told
not to read. The layers are Llama-3-8B's. Written in BF16, a product moves 2 bytes an element and
little beside them; in FP32 4; added 8. The bound is the product's FLOPs at the rate of a large
GEMM, or those bytes at the rate of a copy if they take longer.
"""

from collections.abc import Callable, Sequence
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
    rows = size.outputs, size.inputs
    lhs, rhs = (
        torch.randn(count, size.tokens, device=device).to(dtype)
        for count, dtype in zip(rows, dtypes, strict=True)
    )
    out_dtype = torch.bfloat16 if way == "written in BF16" else torch.float32
    out = torch.zeros(rows, dtype=out_dtype, device=device)
    factor = torch.ones((), device=device)
    adds = {"added": True, "added to zeros": torch.zeros((), device=device)}.get(way, False)
    multiply: Callable = partial(scaled_matmul, lhs, rhs, factor, out_dtype, out, adds)
    return lambda mark: multiply()


def run(size: Size, names: Sequence[str], limits: Ceilings, seconds: float) -> list[dict]:
    """Measure one size."""
    builders = {name: partial(product, size, *CONTENDERS[name]) for name in names}
    steps, refused = timing.build(builders)
    laps, rows = timing.measure(steps, seconds), []
    for name in names:
        row: dict = {"size": size, "contender": name}
        if name in refused:
            rows.append(row | {"refused": refused[name]})
            continue
        gemm, way = CONTENDERS[name]
        row |= timing.spread(sum(lap) for lap in laps[name])
        bytes_moved = WAYS[way] * size.outputs * size.inputs
        least = limits.seconds(2 * size.tokens * size.outputs * size.inputs, GEMMS[gemm])
        if least is not None:
            row["bound_ms"] = round(1e3 * max(least, bytes_moved / limits.copy), 4)
        rows.append(row)
    return rows


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
