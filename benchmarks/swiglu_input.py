"""Error of SwiGLU's gradient where its input is kept in E4M3: as Megatron-LM casts it, and scaled.

python -m benchmarks swiglu_input
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import records
from megatron_lowbit.numerics import quantize
from megatron_lowbit.numerics.swiglu import swiglu_grad

ROWS, WIDTH = 1024, 4096
SPREADS = (0.01, 0.05, 0.5, 5.0)
OUTLIERS = 1e-4
"""Share of values that are a thousand times larger in the last case."""


def errors(x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Return the relative errors of the gradient with the plain cast, and with FP8 tiles."""
    exact = swiglu_grad(x.float(), grad)
    plain = x.to(torch.float8_e4m3fn).to(x.dtype)
    scaled = quantize(x, "fp8-1x128-e4m3").dequantize().to(x.dtype)
    differences = [
        (swiglu_grad(kept.float(), grad) - exact).norm() / exact.norm() for kept in (plain, scaled)
    ]
    return float(differences[0]), float(differences[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each spread of the input."""
    records.parser(__doc__).parse_args(argv)
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, WIDTH, generator=generator)
    grad = torch.randn(ROWS, WIDTH // 2, generator=generator)
    far = 1 + 999 * (torch.rand(ROWS, WIDTH, generator=generator) < OUTLIERS)
    cases = {f"{spread:g}": normal * spread for spread in SPREADS}
    cases[f"1, {OUTLIERS:g} of them times 1000"] = normal * far
    print("| standard deviation | cast | FP8 tiles |\n| --- | --- | --- |")
    for name, x in cases.items():
        plain, scaled = errors(x.bfloat16(), grad)
        print(f"| {name} | {plain:.1%} | {scaled:.1%} |")
