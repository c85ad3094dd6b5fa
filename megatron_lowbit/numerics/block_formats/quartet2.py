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
from megatron_lowbit.numerics.formats import E2M1, TIES_AWAY, decode, encode
from megatron_lowbit.numerics.four_over_six import better_of

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
        amax = finite_amax(amax)
        tensor_scale = decode_scale(amax, MAX_SCALE, E2M1.max)
        tiles = blocks(x, 1, BLOCK)
        amaxes = block_amax(tiles)
        base = amaxes / torch.full_like(amaxes, E2M1.max)
        scales = positive_scales(torch.stack([base, base * 1.5]), tensor_scale)
        steps = scales * tensor_scale
        scaled = tiles / steps
        ties = torch.full_like(scaled, TIES_AWAY)
        both = encode(scaled, E2M1, ties if uniform is None else uniform.view(scaled.shape))
        codes, chosen = better_of(both, scales, decode(both, E2M1) * steps - tiles, "mse")
        return codes.view(x.shape), chosen.squeeze(-1).squeeze(1), tensor_scale

    def decode(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode to FP32 (R, K/16, 16)."""
        values = decode(codes.unflatten(-1, (codes.shape[-1] // BLOCK, BLOCK)), E2M1)
        return values * (scales.to(torch.float32) * tensor_scale).unsqueeze(-1)


FORMATS = (Quartet2("quartet2", E2M1, 1),)
