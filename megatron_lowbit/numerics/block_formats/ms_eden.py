"""MS-EDEN: NVFP4 for gradients, unbiased by corrected and stochastically rounded block scales.

Source: "Quartet II" (arXiv 2601.22813v2), section 3.3 and algorithm 1, in the operation order of
its authors' Triton code, with corrections per block of 16 as in the paper and its CUDA kernels. It
is meant for values after a random Hadamard transform with fresh signs, the same for both operands
of a GEMM. All arithmetic is FP32, every quotient correctly rounded:

    D  = (amax_tensor / 255.99) / v                v = 6 / (17/16 * 0.93); 1 where amax_tensor is 0
    s  = e4m3((amax_block / v) / D), 1 in place of 0
    t  = x / (s * D);  q = e2m1(clamp(t, -6, 6))   to nearest, halves away from zero
    c  = s * (sum(t * t) / sum(t * q))             s where the second sum is 0
    s' = e4m3(c)                                   stochastically
    x_hat = q * s' * D

Elements are never rounded stochastically. c corrects the length of the rounded block, and only the
scale that carries it is drawn. The block of the tensor's amax has a scale of about 256, so that c
does not exceed E4M3. Sums are the 16 elements' in order, each product rounded before it is added. A
NaN or an infinity anywhere makes all scales NaN.
"""

from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat, block_amax, blocks, finite_amax
from megatron_lowbit.numerics.formats import E2M1, E4M3, TIES_AWAY, decode, encode
from megatron_lowbit.numerics.fp4_scales import decode_scale, positive_scales

BLOCK = 16
AMAX_SCALE = 255.99
AMAX_ELEMENT = 6.0 / (17.0 / 16.0 * 0.93)


@dataclass(frozen=True)
class MSEden(BlockFormat):
    """Blocks of 1x16; ``scales`` are float8_e4m3fn (R, K/16); ``tensor_scale`` is D.

    Stochastic rounding is that of the scales; nearest rounds the corrected scales to nearest.
    """

    block = BLOCK
    tensor_scaled = True
    scale_bits = 8
    scale_dtype = torch.float8_e4m3fn
    scale_element = E4M3
    scale_kernel = "megatron_lowbit.kernels.block_codes:ms_eden"
    scales_from_numbers = True
    exact_in_bf16 = True

    @property
    def kernel_options(self) -> tuple[float, float]:
        """Largest block scale and what a block's amax becomes, for ``scale_kernel``."""
        return AMAX_SCALE, AMAX_ELEMENT

    @property
    def random_bits(self) -> int:
        """16, as E4M3 scales take; a block takes its first element's number."""
        return 16

    def encode(
        self, x: Tensor, amax: Tensor, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize whole blocks; scales (R, K/16)."""
        amax = finite_amax(amax)
        tensor_scale = decode_scale(amax, AMAX_SCALE, AMAX_ELEMENT)
        tiles = blocks(x, 1, BLOCK)
        most = block_amax(tiles)
        scales = positive_scales(most / torch.full_like(most, AMAX_ELEMENT), tensor_scale)
        scaled = tiles / (scales * tensor_scale)
        codes = encode(scaled, E2M1, torch.full_like(scaled, TIES_AWAY))
        corrected = scales * correction(scaled, decode(codes, E2M1))
        random = None if uniform is None else blocks(uniform, 1, BLOCK)[..., :1]
        final = encode(corrected, E4M3, random)
        return codes.view(x.shape), final.squeeze(-1).squeeze(1), tensor_scale

    def decode(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode to FP32 (R, K/16, 16); code * scale is exact."""
        values = decode(codes.unflatten(-1, (codes.shape[-1] // BLOCK, BLOCK)), E2M1)
        return values * scales.to(torch.float32).unsqueeze(-1) * tensor_scale


def correction(scaled: Tensor, rounded: Tensor) -> Tensor:
    """Return the factor of each block's scale, (..., 1), from its elements (..., 16)."""
    squares, products = (
        reduce(add, (scaled * other).unbind(-1)).unsqueeze(-1) for other in (scaled, rounded)
    )
    return torch.where(products == 0, torch.ones_like(products), squares / products)


FORMATS = (MSEden("ms-eden", E2M1, 1),)
