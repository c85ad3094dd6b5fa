"""TetraJet-v2's double-block format: FP4 with an E4M3 scale for 16 and an FP32 scale for 128.

Source: "TetraJet-v2" (arXiv 2510.27527), in the operation order of its authors' emulation. There is
no scale of the tensor. All arithmetic is FP32, every quotient correctly rounded:

    o     = (amax_128 / 448) / 6;  1 where amax_128 is 0
    i     = e4m3((amax_16 / o) / 6)
    code  = e2m1(clamp(x / (o * i), -6, 6))
    x_hat = code * (o * i)

Stochastic rounding puts 2**-9, the smallest scale, in place of i = 0. Rounded to nearest, what
shares i = 0 saturates, and decodes as zero. (The authors' CUDA kernel multiplies by
1 / (o * i), which gives other codes now and then.) A NaN or an infinity makes all 128 values NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat, Encoded, block_amax, blocks
from megatron_lowbit.numerics.formats import E2M1, E4M3, decode, encode

OUTER, INNER = 128, 16
_INNER_BLOCKS = OUTER // INNER
_OUTER_BYTES = 4
_SCALE_BYTES = _OUTER_BYTES + _INNER_BLOCKS


@dataclass(frozen=True)
class TetraJet2(BlockFormat):
    """Blocks of 1x128 that hold blocks of 1x16; tensor_scale is 1.

    ``scales`` are uint8 (R, 12 * K/128), for each block of 128 the four bytes of o and its eight i.
    """

    block = OUTER
    scale_bits = 8 * _SCALE_BYTES

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        amaxes = block_amax(blocks(x, 1, OUTER)).squeeze(1)
        # A tensor over a tensor: torch may turn tensor / number into tensor * (1 / number).
        six = torch.full_like(amaxes, E2M1.max)
        outer = (amaxes / torch.full_like(amaxes, E4M3.max)) / six
        outer = torch.where(amaxes == 0, torch.ones_like(outer), outer)
        tiles = x.unflatten(-1, (x.shape[-1] // OUTER, _INNER_BLOCKS, INNER))
        inner = (tiles.abs().amax(dim=-1) / outer) / six
        inner = encode(inner, E4M3).to(torch.float32)
        if uniform is not None:
            inner = torch.where(inner == 0, torch.full_like(inner, 2.0**-9), inner)
        # A zero stays one, where its inner scale is 0.
        scaled = torch.where(tiles == 0, tiles, tiles / (outer * inner).unsqueeze(-1))
        codes = encode(scaled.view(x.shape), E2M1, uniform)
        # No sign bit: a NaN's may be any.
        outer_bytes = outer.abs().view(torch.uint8)
        stored = [outer_bytes, encode(inner, E4M3).view(torch.uint8) & 0x7F]
        return codes, torch.cat(stored, dim=-1).flatten(1), torch.ones_like(amax)

    def decode(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode to FP32 (R, K/128, 8, 16)."""
        outer, inner = split_scales(scales)
        tiles = codes.unflatten(-1, (codes.shape[-1] // OUTER, _INNER_BLOCKS, INNER))
        values = decode(tiles, E2M1)
        return values * (outer * inner.to(torch.float32)).unsqueeze(-1)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // OUTER * _SCALE_BYTES


def split_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return stored scales as o, FP32 (R, K/128, 1), and i, float8_e4m3fn (R, K/128, 8)."""
    stored = scales.unflatten(-1, (scales.shape[-1] // _SCALE_BYTES, _SCALE_BYTES))
    outer = stored[..., :_OUTER_BYTES].contiguous().view(torch.float32)
    return outer, stored[..., _OUTER_BYTES:].contiguous().view(torch.float8_e4m3fn)


FORMATS = (TetraJet2("tetrajet2", E2M1, 1),)
