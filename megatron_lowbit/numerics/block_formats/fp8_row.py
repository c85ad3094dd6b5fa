"""FP8 with one dynamic FP32 scale for each row along the contraction axis.

Source: the defining output of Modular's "allreduce_residual_rmsnorm" (per-row max, dynamic scale,
quantize), in the operation order of its helpers ``compute_dynamic_fp8_scale`` and ``fp8_quantize``.
All arithmetic is FP32 and every quotient is correctly rounded:

    scale   = amax / max          max = 448 (E4M3) or 57344 (E5M2); stored
    inverse = 1 / scale           0 where scale is 0
    code    = cast(x * inverse)   saturating

There is no epsilon, so a row of zeros stores scale 0. The source's upper bound of amax is not
offered: it clips. Three things are this package's, as in its other FP8 formats: a reciprocal beyond
FP32 is its largest value (scales below 2**-128, where the source's codes would be infinite or NaN);
every code saturates; and an infinity or a NaN makes its whole row NaN. Other FP8 formats encode by
max / amax and store the reciprocal of that: many scales differ in their last bit.

An operand is quantized along the axis that its GEMM contracts, so a weight (N, K) has a scale for
each output feature in fprop and, as its transpose, one for each input feature in dgrad.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat, Encoded, constant, row_amax
from megatron_lowbit.numerics.formats import E4M3, E5M2, encode

_FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class FP8Row(BlockFormat):
    """A scale for each row. ``scales`` are FP32 decode scales (R, 1); tensor_scale is 1."""

    block = 1
    row_scaled = True
    scale_bits = 0
    scale_dtype = torch.float32

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        """Quantize rows (R, K), each by its own largest magnitude."""
        amaxes = row_amax(x)
        # A tensor over a tensor: torch turns tensor / number into tensor * (1 / number).
        scales = amaxes / torch.full_like(amaxes, self.element.max)
        inverse = (torch.ones_like(scales) / scales).clamp(max=_FLT_MAX)
        inverse = torch.where(scales == 0, 0.0, inverse)
        codes = encode(x * inverse, self.element, uniform)
        return codes, scales, constant(1.0, like=x)


FORMATS = tuple(FP8Row(f"fp8-row-{element.name}", element, 1) for element in (E4M3, E5M2))
