"""Device functions: element codes, block amaxes and scales spread over their blocks.

All of it FP32 and integer arithmetic in the reference's order, nothing left to a cast: hardware and
Triton's interpreter round 8-bit casts differently, additions they round alike.

"""

from typing import NamedTuple

import triton
import triton.language as tl


class Element(NamedTuple):
    """An element format as a constexpr: ``min_exponent`` is that of the smallest normal, biased."""

    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float
    nan_code: int


@triton.jit
def abs_bits(x):
    """FP32 magnitudes as integers of the same order, in which NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def on_grid(x, words, E: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Magnitudes of x, not NaN, rounded to E's grid: (codes, rounded magnitudes).

    Adding a number whose ulp is the grid's step rounds to nearest-even, and the sum's low bits
    count the steps. ``words`` are the random uint32 of stochastic rounding.
    """
    magnitude = tl.minimum(tl.abs(x), E.max)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, E.min_exponent)
    anchor_bits = (exponent << 23) + (((23 - E.mantissa_bits) << 23) + 0x400000)
    anchor = anchor_bits.to(tl.float32, bitcast=True)
    total = magnitude + anchor
    rounded = total - anchor
    codes = (
        total.to(tl.int32, bitcast=True)
        - anchor_bits
        + ((exponent - E.min_exponent) << E.mantissa_bits)
    )
    if STOCHASTIC:
        # To the neighbour below, then up by chance; every difference here is exact.
        step = ((exponent - E.mantissa_bits) << 23).to(tl.float32, bitcast=True)
        over = rounded > magnitude
        rounded = tl.where(over, rounded - step, rounded)
        codes = tl.where(over, codes - 1, codes)
        per_step = ((254 + 24 + E.mantissa_bits - exponent) << 23).to(
            tl.float32, bitcast=True
        )  # 2**24 / step
        up = (words >> 8).to(tl.int32).to(tl.float32) < (magnitude - rounded) * per_step
        codes = tl.where(up, codes + 1, codes)
    return codes, rounded


@triton.jit
def encode(x, words, E: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes (int32) of x in E, the sign in the top bit of E's width."""
    codes, _ = on_grid(x, words, E, STOCHASTIC)
    sign = (x.to(tl.int32, bitcast=True) >> (32 - E.bits)) & (1 << (E.bits - 1))
    return tl.where(x != x, E.nan_code, codes | sign)


@triton.jit
def bf16_values(x):
    """x rounded to BF16, as FP32."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def block_amax(x, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[A, B] to the largest magnitude of each ROWS x BLOCK, [A // ROWS, B // BLOCK]; NaN wins."""
    if ROWS == 1:
        most = tl.max(tl.reshape(abs_bits(x), (A, B // BLOCK, BLOCK)), 2)
    else:
        tiles = tl.reshape(abs_bits(x), (A // ROWS, ROWS, B // BLOCK, BLOCK))
        most = tl.max(tl.max(tiles, 3), 1)
    return most.to(tl.float32, bitcast=True)


@triton.jit
def over_block(scale, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[A // ROWS, B // BLOCK] to [A, B]: a block's number for each of its elements."""
    if ROWS == 1:
        wide = tl.broadcast_to(scale[:, :, None], (A, B // BLOCK, BLOCK))
    else:
        wide = tl.broadcast_to(scale[:, None, :, None], (A // ROWS, ROWS, B // BLOCK, BLOCK))
    return tl.reshape(wide, (A, B))


@triton.jit
def over_rows(scale, A: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
    """[A // ROWS, N] to [A, N]: a block's number for each of its rows."""
    if ROWS == 1:
        return scale
    else:
        return tl.reshape(tl.broadcast_to(scale[:, None, :], (A // ROWS, ROWS, N)), (A, N))
