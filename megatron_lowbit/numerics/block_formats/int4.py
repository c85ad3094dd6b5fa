"""INT4 in groups: 4-bit integers, one BF16 scale for 32 or 128 of them, no zero point.

Source: the symmetric scheme of compressed-tensors 0.20 (``calculate_qparams`` and ``quantize``),
which llm-compressor applies as W4A16. Arithmetic is FP32 and every quotient is correctly rounded:

    scale = bf16(amax / 7.5)     half of the range -8..7; 2**-7, BF16's epsilon, in place of 0
    q     = round(x / scale)     to nearest-even, clamped to -8..7
    code  = q + 8                0..15, as the ``pack-quantized`` layout stores it

An element at +amax saturates at 7, one at -amax becomes -8 (7.5 is a tie, -8 its even neighbour).
The source computes in the dtype of its weights; this is its result for FP32 weights with scales
rounded to BF16. An infinity or a NaN makes its group's scale, and so the group, NaN.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import (
    BlockFormat,
    Encoded,
    block_amax,
    blocks,
    constant,
    for_each_row,
)
from megatron_lowbit.numerics.formats import ElementFormat, round_to_grid

LOWEST, HIGHEST = -8.0, 7.0
# On [-8, 7] a float with one exponent bit and two of mantissa has the integers' grid.
INT4 = ElementFormat("int4", 1, 2, max=HIGHEST, min_normal=4.0)
_ROUNDED = replace(INT4, max=-LOWEST)  # beyond the integers, which saturate after rounding
_EPSILON = 2.0**-7


def _round_to_bf16(x: Tensor) -> Tensor:
    """Round FP32 magnitudes to BF16's nearest-even, and keep them in FP32.

    By integers: torch.compile may omit a cast to BF16 and back.
    """
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


@dataclass(frozen=True)
class INT4Group(BlockFormat):
    """Groups of 1 x ``block``. ``scales`` are BF16 (R, K/block); tensor_scale is 1."""

    block: int  # type: ignore[misc]  # the other formats' is their class's

    scale_bits = 16
    scale_dtype = torch.bfloat16

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        groups = blocks(x, 1, self.block)
        largest = block_amax(groups)
        # A tensor over a tensor: torch turns tensor / number into tensor * (1 / number).
        scale = _round_to_bf16(largest / torch.full_like(largest, (HIGHEST - LOWEST) / 2))
        scale = torch.where(scale == 0, _EPSILON, scale)
        steps = round_to_grid((groups / scale).view(x.shape), _ROUNDED, uniform)
        codes = steps.clamp(LOWEST, HIGHEST) - LOWEST
        codes = torch.where(codes.isnan(), -LOWEST, codes).to(torch.uint8)  # the scale says NaN
        return codes, for_each_row(scale, 1).to(torch.bfloat16), constant(1.0, like=x)

    def decode(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode to FP32 (R, K/block, block); code * scale is exact."""
        steps = codes.unflatten(-1, (codes.shape[-1] // self.block, self.block)).to(torch.float32)
        values: Tensor = (steps + LOWEST) * scales.to(torch.float32).unsqueeze(-1)
        return values


FORMATS = tuple(INT4Group(f"int4-1x{block}", INT4, 1, block) for block in (32, 128))
