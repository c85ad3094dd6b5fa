"""IF4: a block of 16 is in E2M1 or in 4-bit integers, and the sign of its scale says which.

Source: "Adaptive Block-Scaled Data Types" (arXiv 2603.28765), in the operation order of the library
of its authors, ``fouroversix``. S_enc and enc_b are as in ``nvfp4.py``, with the amax of a block
divided by 6; ``sixteen_seventeenths`` is the library's ``stochastic_unbiased``. Both candidates of
a block have the scale s_b. All arithmetic is FP32:

    float   = e2m1(clamp(x * enc_b, -6, 6))
    integer = round(clamp(x * enc_b * fp32(7/6), -7, 7))           to nearest-even
    d_float = ((float * s_b) * amax_tensor) / (6 * 448) - x
    d_int   = (((integer * s_b) * amax_tensor) * fp32(6/7)) / (6 * 448) - x
    x_hat   = (float or integer * fp32(6/7)) * s_b * (1 / S_enc)

Integers are taken where their error is less, not where it is the same: the sum of d**2 (``mse``),
the sum of |d| (``mae``) or the largest |d| (``abs_max``), in the order of the elements. Their codes
are two's complement without -8, and the block stores -s_b. Stochastic rounding takes random numbers
of its own for each candidate, and the choice biases it, as four-over-six does. (The library sums in
another order, which decides a few near ties otherwise, and its CPU code lacks the clamp to 6 of
blocks whose scale is subnormal.)
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import (
    BlockFormat,
    Encoded,
    block_amax,
    blocks,
    constant,
    encode_scale,
    finite_amax,
    for_each_row,
    multiplier,
)
from megatron_lowbit.numerics.block_formats.int4 import INT4
from megatron_lowbit.numerics.formats import (
    E2M1,
    E4M3,
    decode,
    encode,
    grid_to_codes,
    round_to_grid,
)
from megatron_lowbit.numerics.four_over_six import better_of

BLOCK = 16
_STEP = 6.0 / 7.0


@dataclass(frozen=True)
class IF4(BlockFormat):
    """Blocks of 1x16; ``scales`` are float8_e4m3fn (R, K/16), negative for blocks of integers."""

    selection: Literal["mse", "mae", "abs_max"] = "mse"
    sixteen_seventeenths: bool = False

    block = BLOCK
    tensor_scaled = True
    scale_bits = 8
    scale_dtype = torch.float8_e4m3fn
    draws = 2
    OPTIONS: ClassVar = {
        "selection": ("mse", "mae", "abs_max"),
        "sixteen_seventeenths": (False, True),
    }

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        amax = finite_amax(amax)
        largest = E2M1.max * (16.0 / 17.0 if self.sixteen_seventeenths else 1.0)
        s_enc = encode_scale(amax, largest * E4M3.max)
        s_dec = 1.0 / s_enc
        tiles = blocks(x, 1, BLOCK)
        amaxes = block_amax(tiles)
        scales = encode((amaxes / torch.full_like(amaxes, largest)) * s_enc, E4M3).float()
        scaled = tiles * multiplier(scales, s_dec)
        random = (None, None) if uniform is None else uniform.view(2, *tiles.shape)
        floats = round_to_grid(scaled, E2M1, random[0])
        integers = round_to_grid(scaled * constant(1.0 / _STEP, like=x), INT4, random[1])
        values = torch.stack([floats, integers]) * scales * amax
        steps = torch.stack([torch.ones_like(amax), constant(_STEP, like=x)]).view(2, 1, 1, 1, 1)
        values = values * steps / torch.full_like(amax, largest * E4M3.max)
        twos = torch.where(integers < 0, integers + 16.0, integers).nan_to_num().to(torch.uint8)
        codes = torch.stack([grid_to_codes(floats, E2M1), twos])
        both = torch.stack([scales, -scales])
        codes, stored = better_of(codes, both, values - tiles, self.selection)
        return codes.view(x.shape), for_each_row(stored, 1), s_dec

    def decode(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode to FP32 (R, K/16, 16)."""
        nibbles = codes.unflatten(-1, (codes.shape[-1] // BLOCK, BLOCK))
        integers = nibbles.float()
        integers = torch.where(integers >= 8.0, integers - 16.0, integers)
        integers = integers * constant(_STEP, like=integers)
        stored = scales.float().unsqueeze(-1)
        values: Tensor = torch.where(stored < 0, integers, decode(nibbles, E2M1)) * stored.abs()
        return values * tensor_scale


FORMATS = (IF4("if4", E2M1, 1),)
