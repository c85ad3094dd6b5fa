"""Device functions: rounding to an element's grid, codes and values, block amaxes.

FP32 arithmetic in the reference's order. Casts to narrower types are the GPU's own instructions;
Triton's interpreter rounds those otherwise and takes arithmetic that gives the same bits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

HARDWARE_CASTS = tl.constexpr(not triton.knobs.runtime.interpret)


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
def with_sign(magnitude, x):
    """magnitude with the sign of x."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def on_grid(x, words, E: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Magnitudes of x, not NaN, rounded to E's grid and no larger than its largest.

    Adding a number whose ulp is the grid's step rounds to nearest-even. ``words`` are the random
    uint32 of stochastic rounding. Every difference here is exact.
    """
    ANCHOR: tl.constexpr = 1.5 * 2.0 ** (23 - E.mantissa_bits)
    magnitude = tl.minimum(tl.abs(x), E.max)
    bits = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(bits, E.min_exponent << 23).to(tl.float32, bitcast=True)
    rounded = tl.fma(power, -ANCHOR, tl.fma(power, tl.full((), ANCHOR, tl.float32), magnitude))
    if STOCHASTIC:
        # Down to the neighbour below, then up by chance: with u = word / 2**24, up where
        # u < (magnitude - below) / step. That is u - 1 < (magnitude - above) / step.
        STEP: tl.constexpr = 2.0 ** (-E.mantissa_bits)
        off = magnitude - rounded
        count = (words >> 8).to(tl.int32).to(tl.float32)
        count = tl.where(off < 0.0, count - 16777216.0, count)
        step = power * STEP
        below = tl.where(off < 0.0, rounded - step, rounded)
        rounded = tl.where(count * (power * (STEP * 2.0**-24)) < off, below + step, below)
    return rounded


@triton.jit
def magnitude_codes(rounded, E: tl.constexpr):
    """Codes (int32) of magnitudes on E's grid: FP32's bits, once exponents begin where E's do."""
    REBASE: tl.constexpr = 2.0 ** (1 - E.min_exponent)
    return (rounded * REBASE).to(tl.int32, bitcast=True) >> (23 - E.mantissa_bits)


@triton.jit
def encode(x, words, E: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes (int32) of x in E, the sign in the top bit of E's width."""
    if HARDWARE_CASTS and E.bits == 8 and not STOCHASTIC:
        if E.mantissa_bits == 3:
            code = x.to(tl.float8e4nv)
        else:
            # This one does not saturate infinities.
            x = tl.minimum(x, E.max, propagate_nan=tl.PropagateNan.ALL)
            code = tl.maximum(x, -E.max, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e5)
        return code.to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        code = magnitude_codes(on_grid(x, words, E, STOCHASTIC), E)
        sign = (x.to(tl.int32, bitcast=True) >> (32 - E.bits)) & (1 << (E.bits - 1))
        return tl.where(x != x, E.nan_code, code | sign)


@triton.jit
def bf16_values(x):
    """x rounded to BF16, as FP32."""
    if HARDWARE_CASTS:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
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
