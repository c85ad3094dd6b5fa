"""Cost of adding a weight's gradient to an FP32 main gradient, inside the GEMM that computes it.

    python -m benchmarks main_grad --sweep

Products of dY's transpose (N, tokens) and X's transpose (K, tokens) in BF16 and in FP8 with a scale
per tensor: written in BF16, written in FP32, and added to FP32. The layers are Llama-3-8B's. An
element of the product moves 2 bytes if it is written in BF16, 4 in FP32, and 8 if it is added. The
bound is the product's FLOPs at the rate of a large GEMM, or those bytes at the rate of a copy if
they take longer.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import runner, timing
from benchmarks.timing import Ceilings
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
WAYS = {"written in BF16": 2, "written": 4, "added": 8}
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
    return lambda mark: scaled_matmul(lhs, rhs, factor, out_dtype, out, way == "added")


def run(size: Size, names: Sequence[str], limits: Ceilings, seconds: float) -> list[dict]:
    """Measure one size."""
    elements = size.outputs * size.inputs

    def row(name: str, laps: list[list[float]]) -> dict:
        gemm, way = CONTENDERS[name]
        least = limits.seconds(2 * size.tokens * elements, GEMMS[gemm])
        bound = least and round(1e3 * max(least, WAYS[way] * elements / limits.copy), 4)
        return timing.spread(map(sum, laps)) | ({} if bound is None else {"bound_ms": bound})

    builders = {name: partial(product, size, *CONTENDERS[name]) for name in names}
    return runner.rows_of(builders, row, {"size": size}, seconds)


COLUMNS = {"ms": "median_ms", "bound": "bound_ms"}
main = runner.over_sizes("main_grad", __doc__, CONTENDERS, SIZES, run, COLUMNS)
