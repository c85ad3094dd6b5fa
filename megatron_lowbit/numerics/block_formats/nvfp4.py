"""NVFP4: E2M1 elements, one E4M3 scale a block of 16, one FP32 scale a tensor.

Source: "Pretraining Large Language Models with NVFP4", appendix B, in the operation order of
Transformer Engine's kernels. All scale arithmetic is FP32:

    S_enc = min(448 * 6 / amax_tensor, FLT_MAX);  1 where amax_tensor is 0
    s_b   = e4m3(min(amax_block * (S_enc * fp32(1/6)), 448))
    enc_b = min(1 / (fp32(s_b) * (1 / S_enc)), FLT_MAX)
    code  = e2m1(clamp(x * enc_b, -6, 6))
    x_hat = fp32(code) * fp32(s_b) * (1 / S_enc)

``S_enc * fp32(1/6)`` comes first: dividing the amax by 6 instead rounds twice and lands on another
E4M3 scale for some amax pairs. s_b has no lower clamp: an underflowed block stores scale 0, and its
elements keep the sign and code of x * FLT_MAX, decoded as zero. A NaN or an infinity anywhere makes
the tensor amax, all scales and all decoded values NaN. (Transformer Engine takes S_enc 1 for an
infinite amax, and its amax ignores NaN: the infinity becomes 2688.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import (
    BlockFormat,
    block_amax,
    blocks,
    constant,
    finite_amax,
    for_each_row,
)
from megatron_lowbit.numerics.formats import E2M1, E4M3, ElementFormat, decode, encode

BLOCK = 16
_FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class NVFP4(BlockFormat):
    """The block format, with blocks of 1x16 or 16x16 elements.

    ``scales`` are float8_e4m3fn (R, K/16), those of 16x16 blocks repeated for each of the 16 rows,
    as tensor cores read them; ``tensor_scale`` is the decode scale 1 / S_enc.
    """

    block = BLOCK
    tensor_scaled = True
    scale_bits = 8
    scale_kernel = "megatron_lowbit.kernels.scales:nvfp4_scales"
    scale_dtype = torch.float8_e4m3fn

    @property
    def kernel_options(self) -> ElementFormat:
        """Element format of the scales, for ``scale_kernel``."""
        return E4M3

    @property
    def exact_in_bf16(self) -> bool:
        """True: an element times its scale is a BF16 number."""
        return True

    def encode(
        self, x: Tensor, amax: Tensor, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize whole blocks; scales (R, K/16)."""
        amax = finite_amax(amax)
        # A tensor over a tensor: torch turns number / tensor into number * (1 / tensor).
        s_enc = (torch.full_like(amax, E4M3.max * E2M1.max) / amax).clamp(max=_FLT_MAX)
        s_enc = torch.where(amax == 0, torch.ones_like(s_enc), s_enc)
        s_dec = 1.0 / s_enc
        tiles = blocks(x, self.block_rows, BLOCK)
        sixth = constant(1.0 / 6.0, like=x)
        scales = encode(block_amax(tiles) * (s_enc * sixth), E4M3)
        s_enc_b = (1.0 / (scales.to(torch.float32) * s_dec)).clamp(max=_FLT_MAX)
        codes = encode((tiles * s_enc_b).view(x.shape), E2M1, uniform)
        return codes, for_each_row(scales, self.block_rows), s_dec

    def decode(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode to FP32 (R, K/16, 16); code * scale is exact."""
        values = decode(codes.unflatten(-1, (codes.shape[-1] // BLOCK, BLOCK)), E2M1)
        return values * scales.to(torch.float32).unsqueeze(-1) * tensor_scale


FORMATS = (NVFP4("nvfp4", E2M1, 1), NVFP4("nvfp4-2d", E2M1, BLOCK))
