"""Device functions: rounding to an element's grid, codes and values, block amaxes.

FP32 arithmetic that gives the reference's bits. Casts to narrower types and upward rounding are the
GPU's own instructions; Triton's interpreter lacks them and takes longer ways to the same bits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

HARDWARE_CASTS = tl.constexpr(not triton.knobs.runtime.interpret)


class Element(NamedTuple):
    """An element format as a constexpr: ``min_exponent`` is the smallest normal's, biased."""

    bits: int
    random_bits: int
    mantissa_bits: int
    min_exponent: int
    max: float
    nan_code: int


@triton.jit
def abs_bits(x):
    """Return FP32 magnitudes as integers of the same order, in which NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def larger(a, b):
    """Return the larger of two magnitudes; NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def round_nearest(x, E: tl.constexpr):
    """Round magnitudes of x, not NaN, to E's grid, to nearest and no larger than its largest.

    Adding an anchor, whose ulp is the grid's step, rounds to the grid; taking it away is exact.
    """
    ANCHOR: tl.constexpr = 1.5 * 2.0 ** (23 - E.mantissa_bits)
    magnitude = tl.minimum(tl.abs(x), E.max)
    bits = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(bits, E.min_exponent << 23).to(tl.float32, bitcast=True)
    anchored = tl.fma(power, tl.full((), ANCHOR, tl.float32), magnitude)
    return tl.fma(power, -ANCHOR, anchored)


@triton.jit
def stochastic_codes(x, random, E: tl.constexpr):
    """Round magnitudes of x, not NaN, stochastically and return their codes (int32).

    Once E's smallest normal is FP32's, E's code is the upper part of FP32's bits, subnormals
    included, and the lower part is the fraction: adding ``random``, centred, carries into the code
    with the fraction's probability (``numerics/randomness.py``).
    """
    LOWER: tl.constexpr = 23 - E.mantissa_bits
    UNIT: tl.constexpr = LOWER - E.random_bits
    bits = _rebased_up(tl.minimum(tl.abs(x), E.max), 2.0 ** (1 - E.min_exponent))
    return (bits + (random << UNIT) + ((1 << (UNIT - 1)) - 1)) >> LOWER


@triton.jit
def _rebased_up(magnitude, REBASE: tl.constexpr):
    """Multiply by a power of two below 1, rounding subnormals up; return FP32's bits.

    Rounding up keeps what is above a threshold of the grid above it, and nothing else.
    """
    if HARDWARE_CASTS:
        return tl.inline_asm_elementwise(
            "mul.rp.f32 $0, $1, $2;", "=r,r,r", [magnitude, tl.full((), REBASE, tl.float32)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        nearest = magnitude * REBASE
        below = nearest * (1.0 / REBASE) < magnitude
        return nearest.to(tl.int32, bitcast=True) + below.to(tl.int32)


@triton.jit
def code_values(codes, E: tl.constexpr):
    """Decode magnitudes' codes (int32, not NaN) to FP32."""
    UNBASE: tl.constexpr = 2.0 ** (E.min_exponent - 1)
    return (codes << (23 - E.mantissa_bits)).to(tl.float32, bitcast=True) * UNBASE


@triton.jit
def magnitude_codes(rounded, E: tl.constexpr):
    """Encode magnitudes on E's grid (int32): FP32's bits, once exponents begin where E's do."""
    REBASE: tl.constexpr = 2.0 ** (1 - E.min_exponent)
    return (rounded * REBASE).to(tl.int32, bitcast=True) >> (23 - E.mantissa_bits)


@triton.jit
def encode(x, random, E: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Encode x in E (int32), the sign in the top bit of E's width.

    ``random`` are the bits of stochastic rounding (int32), as many as E says.
    """
    if HARDWARE_CASTS and E.bits == 8 and not STOCHASTIC:
        return _cast(x, E).to(tl.uint8, bitcast=True).to(tl.int32)
    elif E.nan_code == 0:
        magnitude, sign = known_parts(x)
        code, _ = round_to_grid(magnitude, random, E, STOCHASTIC)
        return code | sign_code(sign, E)
    else:
        code, _ = round_to_grid(x, random, E, STOCHASTIC)
        sign = x.to(tl.int32, bitcast=True)
        return tl.where(x != x, E.nan_code, code | sign_code(sign, E))


@triton.jit
def round_to_grid(x, random, E: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Round magnitudes of x, not NaN, to E's grid; return their codes (int32) and values."""
    if STOCHASTIC:
        code = stochastic_codes(x, random, E)
        return code, code_values(code, E)
    else:
        value = round_nearest(x, E)
        return magnitude_codes(value, E), value


@triton.jit
def known_parts(x):
    """Return the magnitude of x and its sign bit (int32), zeros for a NaN.

    On a GPU a NaN comes from an operation, and is positive; the larger of it and 0 is 0.
    """
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    if HARDWARE_CASTS:
        return tl.maximum(tl.abs(x), 0.0), sign
    else:
        known = x == x
        return tl.where(known, tl.abs(x), 0.0), tl.where(known, sign, 0)


@triton.jit
def signed(magnitude, sign):
    """Give an FP32 magnitude its sign bit (int32)."""
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _cast(x, E: tl.constexpr):
    """Cast x to Triton's own type of 8 bits, rounded to nearest."""
    if E.mantissa_bits == 3:
        return x.to(tl.float8e4nv)
    else:
        # This one does not saturate infinities.
        x = tl.minimum(x, E.max, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(x, -E.max, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e5)


@triton.jit
def rounded(x, random, E: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Round x to E's grid, with its sign; for a NaN to any number."""
    if HARDWARE_CASTS and E.bits == 8 and not STOCHASTIC:
        return _cast(x, E).to(tl.float32)
    else:
        _, magnitude = round_to_grid(x, random, E, STOCHASTIC)
        return signed(magnitude, x.to(tl.int32, bitcast=True) & -0x80000000)


@triton.jit
def fold_pair(low, high, ratio, E: tl.constexpr):
    """Encode two tensors as :func:`encode_pair`, multiply the codes by a ratio, encode again.

    The ratio is a power of two of at most 1, or NaN for a block with a NaN. FP16 holds the product
    unless that is so small that it is encoded as 0, as FP16's nearest number is. Ratios of E5M2
    that FP16 lacks are products of two.
    """
    if HARDWARE_CASTS:
        CAST: tl.constexpr = "e4m3x2" if E.mantissa_bits == 3 else "e5m2x2"
        FIRST: tl.constexpr = (
            "mov.f32 u, $3;"
            if E.mantissa_bits == 3
            else "mul.f32 u, $3, 0f45800000; min.NaN.f32 u, u, 0f3F800000; cvt.rn.f16.f32 s, u;"
            " mov.b32 r, {s, s}; mul.rn.f16x2 h, h, r; max.NaN.f32 u, $3, 0f39800000;"
        )
        return tl.inline_asm_elementwise(
            "{.reg .b16 p, s; .reg .b32 h, r; .reg .f32 u;"
            " cvt.rn.satfinite." + CAST + ".f32 p, $2, $1; cvt.rn.f16x2." + CAST + " h, p;"
            " " + FIRST + " cvt.rn.f16.f32 s, u; mov.b32 r, {s, s}; mul.rn.f16x2 h, h, r;"
            " cvt.rn.satfinite." + CAST + ".f16x2 $0, h;}",
            "=h,r,r,r", [low, high, ratio],
            dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = rounded(low, low, E, False), rounded(high, high, E, False)
        return encode_pair(low * ratio, high * ratio, E)


@triton.jit
def encode_pair(low, high, E: tl.constexpr):
    """Encode two tensors in 8 bits each, rounded to nearest, as one int16."""
    if HARDWARE_CASTS:
        CAST: tl.constexpr = "e4m3x2" if E.mantissa_bits == 3 else "e5m2x2"
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite." + CAST + ".f32 $0, $2, $1;", "=h,r,r", [low, high],
            dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        high = encode(high, high, E, False) << 8
        return (encode(low, low, E, False) | high).to(tl.int16)


@triton.jit
def encode_four(a, b, c, d, ratio, E: tl.constexpr, FOLD: tl.constexpr):
    """Encode four tensors in 8 bits each as one int32; with FOLD, codes are times a ratio."""
    if FOLD:
        low, high = fold_pair(a, b, ratio, E), fold_pair(c, d, ratio, E)
    else:
        low, high = encode_pair(a, b, E), encode_pair(c, d, E)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def append_code(words, code, i: tl.constexpr, BITS: tl.constexpr):
    """Append the i-th code of a row to its words (int32), of eight or of four codes."""
    PER: tl.constexpr = 8 if BITS == 4 else 4
    if i % PER == 0:
        return words + (code,)
    else:
        return words[:-1] + (words[-1] | code << i % PER * (32 // PER),)


@triton.jit
def sign_code(bits, E: tl.constexpr):
    """Move the top bit of ``bits`` (int32), the sign, to the top of E's width."""
    return (bits >> (32 - E.bits)) & (1 << (E.bits - 1))


@triton.jit
def exact_bf16(x, E: tl.constexpr):
    """Cast x, an element of E times its block's scale, to BF16, which is exact."""
    if E.bits == 4:
        # Never more than BF16's bits: no need to round.
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def bf16_values(x):
    """Round x to BF16, as FP32."""
    if HARDWARE_CASTS:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def as_dtype(x, DTYPE: tl.constexpr):
    """Round FP32 x to DTYPE (BF16, FP16 or FP32), and keep it in FP32."""
    if tl.bfloat16 == DTYPE:
        return bf16_values(x)
    elif tl.float16 == DTYPE:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def bf16_pair(a, b):
    """Round two tensors to BF16 by one cast, as FP32."""
    if HARDWARE_CASTS:
        return tl.inline_asm_elementwise(
            "{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2;"
            " shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000;}",
            "=r,=r,r,r", [a, b], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return bf16_values(a), bf16_values(b)


@triton.jit
def tile_block_amax(x, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce [A, B] to the amax of each 1 x BLOCK, [A, B // BLOCK]; NaN wins."""
    blocks = tl.reshape(x, (A, B // BLOCK, BLOCK))
    if HARDWARE_CASTS:
        # One instruction an element, which takes magnitudes by itself.
        return tl.reduce(tl.abs(blocks), 2, larger)
    else:
        return tl.max(abs_bits(blocks), 2).to(tl.float32, bitcast=True)


@triton.jit
def over_block(scale, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Expand [A, B // BLOCK] to [A, B]: a block's number for each of its elements."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (A, B // BLOCK, BLOCK)), (A, B))
