"""MX formats: FP8, FP6 or FP4 elements, one E8M0 (power of two) scale per block of 32.

Source: OCP Microscaling Formats (MX) v1.0, section 6.3; the rounding of the scale's exponent in the
naming of torchao. Exponents come from the bits of FP32 numbers, never from a rounded logarithm:

    floor   floor(log2(amax)) - emax    OCP's rule; clips what lies above the largest element
    rceil   ceil(log2(amax / max))      never clips; NVIDIA's rule for MXFP8
    ceil    ceil(log2(amax)) - emax     never clips, may waste a binade
    even    amax rounded to the element's mantissa, halves up, then floor

clamped to [-127, 127]. ``three_quarters`` ("Training LLMs with MXFP4", arXiv 2502.20586, algorithm
2) multiplies the scaled elements by 3/4, so that ``floor`` never clips, and decodes with 4/3: with
stochastic rounding every element is unbiased, to 1/512 of a step with the 8 bits of E2M1.

A block of zeros has scale 2**-127. A NaN or an infinity makes its block's scale, and so all of the
block, NaN: so does microxcaling, the emulation of the specification's authors. (The specification
leaves it open; Transformer Engine and torchao give an infinity the largest scale, where it
saturates.)
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_lowbit.numerics import formats
from megatron_lowbit.numerics.block_format import (
    BlockFormat,
    Encoded,
    block_amax,
    blocks,
    constant,
    for_each_row,
)

BLOCK = 32
ScaleRounding = Literal["floor", "rceil", "ceil", "even"]
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_HALF_OF_MIN_NORMAL = 1 << (_MANTISSA_BITS - 1)
# By name: torch.compile takes a number that differs between elements as a symbol, and torch 2.11
# shifts by none.
_HALF_UNITS = {
    element.name: 1 << (_MANTISSA_BITS - element.mantissa_bits - 1)
    for element in (formats.E2M1, formats.E2M3, formats.E3M2, formats.E4M3, formats.E5M2)
}


def scale_bytes(
    amax: Tensor, element: formats.ElementFormat, scale_rounding: ScaleRounding
) -> Tensor:
    """Round FP32 block amaxes (any shape) to scales, as E8M0 bytes (uint8)."""
    if scale_rounding == "rceil":
        # A tensor over a tensor: torch may turn tensor / number into tensor * (1 / number).
        bits = (amax / torch.full_like(amax, element.max)).view(torch.int32)
        byte = (bits + _MANTISSA) >> _MANTISSA_BITS
        # A subnormal up to 2**-127 itself needs no more than byte 0.
        byte = torch.where(bits <= _HALF_OF_MIN_NORMAL, 0, byte)
    else:
        bits = amax.view(torch.int32)
        if scale_rounding == "even":
            bits = bits + _HALF_UNITS[element.name]
        elif scale_rounding == "ceil":
            bits = bits + _MANTISSA
        byte = (bits >> _MANTISSA_BITS) - element.max_exponent
    byte = byte.clamp(0, 2 * formats.E8M0_BIAS)
    return torch.where(amax.isnan(), formats.E8M0_NAN, byte).to(torch.uint8)


@dataclass(frozen=True)
class MX(BlockFormat):
    """Blocks of 1x32 or 32x32 elements; another ``block`` is for study ("MXNorm", section 4.2).

    ``scales`` are E8M0 bytes, uint8 (R, K/32), for 32x32 blocks repeated for each row;
    ``tensor_scale`` is 1, or 4/3 with ``three_quarters``.
    """

    scale_rounding: ScaleRounding = "floor"
    three_quarters: bool = False
    block: int = BLOCK  # type: ignore[misc]  # the other formats' is their class's

    scale_bits = 8
    exact_in_bf16 = folds = True
    OPTIONS: ClassVar = {
        "scale_rounding": ("floor", "rceil", "ceil", "even"),
        "three_quarters": (False, True),
        "block": (BLOCK, 16),
    }

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        tiles = blocks(x, self.block_rows, self.block)
        scales = scale_bytes(block_amax(tiles), self.element, self.scale_rounding)
        scaled = tiles * formats.reciprocal_e8m0(scales)
        if self.three_quarters:
            scaled = scaled * 0.75
        codes = formats.encode(scaled.view(x.shape), self.element, uniform)
        tensor_scale = constant(4.0 / 3.0 if self.three_quarters else 1.0, like=x)
        return codes, for_each_row(scales, self.block_rows), tensor_scale

    def decode_scales(self, scales: Tensor) -> Tensor:
        """Decode E8M0 bytes; code * scale is exact unless it underflows."""
        return formats.decode_e8m0(scales)


_ELEMENTS = {
    "mxfp4": formats.E2M1,
    "mxfp6-e2m3": formats.E2M3,
    "mxfp6-e3m2": formats.E3M2,
    "mxfp8-e4m3": formats.E4M3,
    "mxfp8-e5m2": formats.E5M2,
}
FORMATS = tuple(
    MX(f"{name}{suffix}", element, rows)
    for name, element in _ELEMENTS.items()
    for suffix, rows in (("", 1), ("-2d", BLOCK))
)
