"""NVFP4 with UE5M3 scales: E2M1 elements, one unsigned E5M3 scale per block of 16.

Source: pull request 3325 of Transformer Engine (open when this was written), and AMD's ALTO. A byte
has 5 exponent bits with bias 15, 3 mantissa bits and no sign: 0x00 to 0x07 are multiples of 2**-17,
0xFE is 114688, the largest, and 0xFF is NaN. All scale arithmetic is FP32:

    S_enc = min(114688 * 6 / amax_tensor, FLT_MAX);  1 where amax_tensor is 0
    s_b   = ue5m3(amax_block * (S_enc * fp32(1/6)))       saturating, to nearest even
    enc_b = min(1 / (s_b * (1 / S_enc)), FLT_MAX)
    code  = e2m1(clamp(x * enc_b, -6, 6))
    x_hat = code * s_b * (1 / S_enc)

With ``tensor_scaled: false`` S_enc is 1 and no tensor amax is needed: the scales' 32 binades span
what activations do. A NaN or an infinity makes the scale of its block NaN, and with a tensor scale
all scales.
"""

from dataclasses import dataclass
from typing import ClassVar

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
from megatron_lowbit.numerics.formats import E2M1, ElementFormat, decode, encode

BLOCK = 16
UE5M3_MAX = 114688.0
SCALE = ElementFormat("ue5m3", 5, 3, UE5M3_MAX, 2.0**-14)
"""UE5M3 as an element format: its ninth bit is a sign that no scale has."""
_NAN = 0xFF


def encode_ue5m3(x: Tensor) -> Tensor:
    """Round FP32 numbers >= 0 (any shape) to UE5M3 bytes, uint8: saturating, halves to even."""
    return torch.where(x.isnan(), _NAN, encode(x, SCALE))


def decode_ue5m3(scales: Tensor) -> Tensor:
    """Decode UE5M3 bytes (uint8) to FP32."""
    return decode(scales, SCALE).masked_fill(scales == _NAN, torch.nan)


@dataclass(frozen=True)
class UE5M3(BlockFormat):
    """Blocks of 1x16 or 16x16 elements; without a tensor scale ``tensor_scale`` is 1.

    ``scales`` are UE5M3 bytes, uint8 (R, K/16), for 16x16 blocks repeated for each row.
    """

    tensor_scaled: bool = True  # type: ignore[misc]  # the other formats' is their class's

    block = BLOCK
    scale_bits = 8
    exact_in_bf16 = True  # a product has at most 6 significant bits
    OPTIONS: ClassVar = {"tensor_scaled": (True, False)}

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        s_enc = constant(1.0, like=x)
        if self.tensor_scaled:
            s_enc = encode_scale(finite_amax(amax), UE5M3_MAX * E2M1.max)
        s_dec = 1.0 / s_enc
        tiles = blocks(x, self.block_rows, BLOCK)
        scales = encode_ue5m3(block_amax(tiles) * (s_enc * constant(1.0 / 6.0, like=x)))
        scaled = tiles * multiplier(decode_ue5m3(scales), s_dec)
        codes = encode(scaled.view(x.shape), E2M1, uniform)
        return codes, for_each_row(scales, self.block_rows), s_dec

    def decode_scales(self, scales: Tensor) -> Tensor:
        """Decode UE5M3 bytes; code * scale is exact."""
        return decode_ue5m3(scales)


FORMATS = (UE5M3("nvfp4-ue5m3", E2M1, 1), UE5M3("nvfp4-ue5m3-2d", E2M1, BLOCK))
