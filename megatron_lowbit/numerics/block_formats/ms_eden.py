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

``arithmetic: torchao`` follows torchao and NVIDIA's kitchen, which have other bits:

    S  = min(1536 / amax_tensor, FLT_MAX);  D = 1 / S       S = 1 where amax_tensor is 0
    s  = e4m3((amax_block * (1/6)) * S)
    t  = x * min(1 / (s * D), FLT_MAX);  q = e2m1(clamp(t, -6, 6))      ties to even
    c  = s * (sum(t * t) / sum(t * q))                      0 where s is 0

Its sums are of fused multiply-adds. (There, 20 random bits are added to the bits of c below E4M3's;
here a scale takes 16, as all E4M3 numbers do.)
"""

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import (
    BlockFormat,
    Encoded,
    block_amax,
    blocks,
    decode_scale,
    encode_scale,
    finite_amax,
    multiplier,
    positive_scales,
)
from megatron_lowbit.numerics.formats import E2M1, E4M3, TIES_AWAY, decode, encode


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a * b + c in FP32 as one correctly rounded operation.

    The product is exact in FP64. The sum is rounded to odd there: a number that FP64 does not hold
    becomes the neighbour whose last bit is 1, so that the rounding to FP32 sees no false tie
    (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    # What the sum lost, exactly (Knuth's two-sum); NaN where the sum is not finite.
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    changed = (bits & 1 == 0) & (lost.abs() > 0)
    outward = (lost > 0) == (total > 0)
    step = torch.where(changed, torch.where(outward, 1, -1), 0)
    return (bits + step).view(torch.float64).to(torch.float32)


BLOCK = 16
AMAX_SCALE = 255.99
AMAX_ELEMENT = 6.0 / (17.0 / 16.0 * 0.93)
TOP = 256.0 * 6.0
"""Number that torchao's arithmetic scales a tensor's amax to."""


@dataclass(frozen=True)
class MSEden(BlockFormat):
    """Blocks of 1x16; ``scales`` are float8_e4m3fn (R, K/16); ``tensor_scale`` is D.

    Stochastic rounding applies to the scales; nearest rounds the corrected scales to nearest.
    """

    arithmetic: str = "quartet2"

    block = BLOCK
    tensor_scaled = True
    scale_bits = 8
    OPTIONS: ClassVar[dict[str, tuple[Any, ...]]] = {"arithmetic": ("quartet2", "torchao")}
    scale_dtype = torch.float8_e4m3fn
    exact_in_bf16 = True
    random_bits = 16  # as E4M3 scales take; a block takes its first element's number

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        quantize = _torchao if self.arithmetic == "torchao" else _quartet2
        codes, corrected, tensor_scale = quantize(blocks(x, 1, BLOCK), finite_amax(amax))
        random = None if uniform is None else blocks(uniform, 1, BLOCK)[..., :1]
        scales = encode(corrected, E4M3, random)
        return codes.view(x.shape), scales.squeeze(-1).squeeze(1), tensor_scale


def _quartet2(tiles: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (..., 16), corrected scales (..., 1) and the tensor scale."""
    tensor_scale = decode_scale(amax, AMAX_SCALE, AMAX_ELEMENT)
    amaxes = block_amax(tiles)
    scales = positive_scales(amaxes / torch.full_like(amaxes, AMAX_ELEMENT), tensor_scale)
    scaled = tiles / (scales * tensor_scale)
    codes = encode(scaled, E2M1, torch.full_like(scaled, TIES_AWAY))
    squares, products = (
        reduce(add, (scaled * other).unbind(-1)).unsqueeze(-1)
        for other in (scaled, decode(codes, E2M1))
    )
    return codes, scales * _correction(squares, products), tensor_scale


def _torchao(tiles: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (..., 16), corrected scales (..., 1) and the tensor scale."""
    encode_tensor = encode_scale(amax, TOP)
    tensor_scale = 1.0 / encode_tensor
    scales = encode(block_amax(tiles) * (1.0 / 6.0) * encode_tensor, E4M3).to(torch.float32)
    scaled = tiles * multiplier(scales, tensor_scale)
    codes = encode(scaled, E2M1)
    squares, products = (
        _fused_sum(scaled, other).unsqueeze(-1) for other in (scaled, decode(codes, E2M1))
    )
    # Under a scale of 0 the sums overflow.
    corrected = torch.where(scales == 0, scales, scales * _correction(squares, products))
    return codes, corrected, tensor_scale


def _fused_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum products along the last axis, one after another, by fused multiply-adds."""
    total = a[..., 0] * b[..., 0]
    for left, right in zip(a[..., 1:].unbind(-1), b[..., 1:].unbind(-1), strict=True):
        total = fused_multiply_add(left, right, total)
    return total


def _correction(squares: Tensor, products: Tensor) -> Tensor:
    """Return the factor of each block's scale."""
    return torch.where(products == 0, torch.ones_like(products), squares / products)


FORMATS = (MSEden("ms-eden", E2M1, 1),)
