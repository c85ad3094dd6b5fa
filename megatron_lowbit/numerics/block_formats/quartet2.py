"""Quartet II's forward format: NVFP4 blocks with the better of two scales, by their squared error.

Source: "Quartet II" (arXiv 2601.22813v2), in the operation order of its authors' code. It is
four-over-six (``four_over_six.py``) with other divisions and roundings. All arithmetic is FP32:

    D     = (amax_tensor / 256) / 6;  1 where amax_tensor is 0
    s_k   = e4m3((amax_block / 6 * f) / D), 1 in place of 0        f = 1 for k = 6, 1.5 for k = 4
    t     = x / (s_k * D);  q = e2m1(clamp(t, -6, 6))              halves away from zero
    x_hat = q * (s_k * D)

A block takes the scale of k = 6 where the sum of its squared errors is at most that for k = 4. Sums
are the 16 elements' in order. A NaN or an infinity anywhere makes all scales NaN.
"""

from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import (
    BlockFormat,
    Encoded,
    block_amax,
    blocks,
    decode_scale,
    finite_amax,
    positive_scales,
)
from megatron_lowbit.numerics.formats import E2M1, E4M3, TIES_AWAY, decode, encode

BLOCK = 16
MAX_SCALE = 256.0


@dataclass(frozen=True)
class Quartet2(BlockFormat):
    """Blocks of 1x16; ``scales`` are float8_e4m3fn (R, K/16); ``tensor_scale`` is D.

    A GPU multiplies exact q * s_k in BF16 and the sums by D: s_k * D is not rounded there.
    """

    block = BLOCK
    tensor_scaled = True
    scale_bits = 8
    scale_dtype = torch.float8_e4m3fn
    exact_in_bf16 = True
    draws = 2  # both candidates are rounded

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        """Quantize whole blocks; scales (R, K/16)."""
        amax = finite_amax(amax)
        tensor_scale = decode_scale(amax, MAX_SCALE, E2M1.max)
        tiles = blocks(x, 1, BLOCK)
        amaxes = block_amax(tiles)
        base = amaxes / torch.full_like(amaxes, E2M1.max)
        codes, scales, errors = [], [], []
        for candidate, factor in enumerate((1.0, 1.5)):
            scale = positive_scales(base * factor, tensor_scale)
            step = scale * tensor_scale
            random = torch.full_like(tiles, TIES_AWAY)
            if uniform is not None:
                random = uniform[candidate].view(tiles.shape)
            code = encode(tiles / step, E2M1, random)
            difference = decode(code, E2M1) * step - tiles
            codes.append(code)
            scales.append(scale)
            errors.append(reduce(add, (difference * difference).unbind(-1)).unsqueeze(-1))
        four = errors[1] < errors[0]
        chosen = encode(torch.where(four, scales[1], scales[0]), E4M3)
        codes_of_chosen = torch.where(four, codes[1], codes[0]).view(x.shape)
        return codes_of_chosen, chosen.squeeze(-1).squeeze(1), tensor_scale

    def decode(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode to FP32 (R, K/16, 16)."""
        values = decode(codes.unflatten(-1, (codes.shape[-1] // BLOCK, BLOCK)), E2M1)
        return values * (scales.to(torch.float32) * tensor_scale).unsqueeze(-1)


FORMATS = (Quartet2("quartet2", E2M1, 1),)
