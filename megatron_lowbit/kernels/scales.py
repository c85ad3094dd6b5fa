"""Device functions: each format's scales from its block amaxes, as ``numerics/block_formats`` says.

A function takes block amaxes, the tensor's amax, the element format and the format's options, all
of one shape for one format, and gives (what is stored, what elements are multiplied by, the block's
decode scale, the tensor's decode scale). Amaxes that are not finite give NaN factors and scales.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import (
    HARDWARE_CASTS,
    Element,
    abs_bits,
    magnitude_codes,
    round_nearest,
)

FLT_MAX = tl.constexpr(3.4028234663852886e38)
SIXTH = tl.constexpr(0.1666666716337204)  # 1 / 6 in FP32
FOUR_THIRDS = tl.constexpr(1.3333333730697632)

FLOOR = tl.constexpr(0)
RCEIL = tl.constexpr(1)
CEIL = tl.constexpr(2)
EVEN = tl.constexpr(3)


class ScaleOptions(NamedTuple):
    """Options of the scale functions that round to an element format, ``element``.

    ``top`` is what the tensor's amax is scaled to, 0 without a tensor scale. ``divisor`` is what
    blocks' amaxes are divided by before that; 0 multiplies by a sixth of the tensor's scale.
    ``rounding`` is the index of NVFP4's ``block_scales``, ``selection`` of its ``four_over_six``.
    """

    element: Element
    top: float
    divisor: float = 0.0
    rounding: int = 0
    selection: int = 0


@triton.jit
def quotient(numerator, denominator):
    """Divide a number by a tensor or scalar as IEEE does, saturating; NaN stays NaN."""
    ratio = tl.div_rn(tl.zeros_like(denominator) + numerator, denominator)
    return tl.where(ratio > FLT_MAX, FLT_MAX, ratio)


@triton.jit
def quotient_by(x, TOP: tl.constexpr):
    """Divide positive numbers by a constant, with IEEE's bits where the quotient is normal.

    A quotient by the reciprocal, corrected by its remainder (Markstein, "Computation of elementary
    functions on the IBM RISC System/6000 processor", 1990), is right for all significands of FP32
    if the constant is 3 or 21 times a power of two, as 6 * 256 and 6 * 448 are.
    """
    if HARDWARE_CASTS:
        ratio = x * (1.0 / TOP)
        ratio = tl.fma(tl.fma(ratio, -TOP, x), tl.full((), 1.0 / TOP, tl.float32), ratio)
        # The remainder of infinity is NaN, and the smaller of NaN and infinity is infinity.
        return tl.minimum(ratio, float("inf"))
    else:
        # The interpreter's FMA rounds twice.
        return tl.div_rn(x, tl.zeros_like(x) + TOP)


@triton.jit
def finite_or_nan(scale, amax):
    """Return the scale of a finite amax, NaN for any other."""
    return tl.where(amax <= FLT_MAX, scale, float("nan"))


@triton.jit
def nvfp4_scales(block_amax, amax, E: tl.constexpr, OPTIONS: tl.constexpr):
    """Return E4M3 codes, 1 / (scale * tensor scale), scales, tensor scale.

    OPTIONS: ScaleOptions.
    """
    E4M3: tl.constexpr = OPTIONS.element
    s_enc, s_dec = encode_scale(amax, OPTIONS.top)
    if OPTIONS.divisor > 0.0:
        base = tl.div_rn(block_amax, tl.zeros_like(block_amax) + OPTIONS.divisor) * s_enc
    else:
        base = block_amax * (s_enc * SIXTH)
    scale = finite_or_nan(base, block_amax)
    if OPTIONS.rounding:
        value = _foldable(scale, OPTIONS.rounding == 2)
    else:
        value = round_nearest(scale, E4M3)
    code, value = scale_code(value, scale, E4M3)
    return code, quotient(1.0, value * s_dec), value, s_dec


@triton.jit
def encode_scale(amax, TOP: tl.constexpr):
    """Return the factor that brings a tensor's amax to TOP, 1 for zeros, and its reciprocal."""
    s_enc = quotient(TOP, amax)
    s_enc = tl.where(amax == 0.0, 1.0, finite_or_nan(s_enc, amax))
    return s_enc, quotient(1.0, s_enc)


@triton.jit
def scale_code(value, scale, E: tl.constexpr):
    """Return the codes and values of scales that were rounded to ``value``, NaN for NaN."""
    nan = scale != scale
    code = tl.where(nan, E.nan_code, magnitude_codes(value, E))
    return code, tl.where(nan, scale, value)


@triton.jit
def _foldable(scale, UP: tl.constexpr):
    """Round to 1, 1.25 or 1.5 times a power of two, up to 384, as the reference does."""
    QUARTER: tl.constexpr = 1 << 21
    HALF_UP: tl.constexpr = QUARTER - 1 if UP else QUARTER // 2
    LAST: tl.constexpr = 2 * QUARTER + 1 if UP else 3 * QUARTER
    scale = tl.minimum(scale, 384.0)
    bits = scale.to(tl.int32, bitcast=True)
    mantissa = bits & 0x7FFFFF
    quarters = tl.minimum((mantissa + HALF_UP) >> 21, 2)
    quarters = tl.where(mantissa >= LAST, 4, quarters)
    grid = ((bits & 0x7F800000) + (quarters << 21)).to(tl.float32, bitcast=True)
    below = tl.floor(scale * 512.0)
    rest = scale * 512.0 - below
    above = rest > 0.0 if UP else rest >= 0.5
    small = (below + above.to(tl.float32)) * (1.0 / 512.0)
    return tl.where(scale < 2.0**-7, small, grid)


@triton.jit
def ue5m3_scales(block_amax, amax, E: tl.constexpr, OPTIONS: tl.constexpr):
    """Return UE5M3 bytes (int32), 1 / (scale * tensor scale), scales, tensor scale.

    OPTIONS: ScaleOptions.
    """
    UE5M3: tl.constexpr = OPTIONS.element
    s_enc, s_dec = 1.0, 1.0
    if OPTIONS.top > 0.0:
        s_enc, s_dec = encode_scale(amax, OPTIONS.top)
    scale = finite_or_nan(block_amax * (s_enc * SIXTH), block_amax)
    code, value = scale_code(round_nearest(scale, UE5M3), scale, UE5M3)
    return code, quotient(1.0, value * s_dec), value, s_dec


@triton.jit
def mx_scales(block_amax, amax, E: tl.constexpr, OPTIONS: tl.constexpr):
    """Return E8M0 bytes (int32), their reciprocals (times 3/4), powers of two, 1 or 4/3.

    OPTIONS: (rounding of the scale, three quarters, exponent of the largest magnitude, its fraction
    as FP32 has it).
    """
    bits = block_amax.to(tl.int32, bitcast=True)
    if OPTIONS[0] == RCEIL:
        # The quotient's exponent, one more if amaxes have a larger fraction than the largest
        # magnitude. At 2**-127, where quotients are subnormal, the next amax gives the same one.
        TOP: tl.constexpr = (OPTIONS[2] << 23) + OPTIONS[3]
        bits = tl.where(bits == TOP + 1, TOP, bits)
        byte = ((bits + (0x7FFFFF - OPTIONS[3])) >> 23) - OPTIONS[2]
    else:
        if OPTIONS[0] == EVEN:
            bits += 1 << (22 - E.mantissa_bits)
        elif OPTIONS[0] == CEIL:
            bits += 0x7FFFFF
        byte = (bits >> 23) - OPTIONS[2]
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    # Exponent fields; 2**-127 is subnormal.
    inverse = tl.where(byte == 254, 1 << 22, (254 - byte) << 23)
    factor = finite_or_nan(inverse.to(tl.float32, bitcast=True), block_amax)
    power = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    power = finite_or_nan(power, block_amax)
    byte = tl.where(block_amax <= FLT_MAX, byte, 255)
    if OPTIONS[1]:
        return byte, factor * 0.75, power, FOUR_THIRDS
    else:
        return byte, factor, power, 1.0


@triton.jit
def _fp8_scale(amax, E: tl.constexpr, POW2: tl.constexpr):
    bits = abs_bits(amax)
    if POW2:
        # The quotient's exponent field: both elements' largest is 1.75 times a power of two, and
        # above 1.75 times another the quotient is below a power of two.
        TOP: tl.constexpr = 262 if E.mantissa_bits == 3 else 269
        field = tl.minimum(TOP - ((bits + 0x1FFFFF) >> 23), 254)
        scale = (field << 23).to(tl.float32, bitcast=True)
    else:
        scale = quotient(E.max, amax)
    return tl.where(bits == 0, 1.0, finite_or_nan(scale, amax))


@triton.jit
def _inverse(scale, POW2: tl.constexpr):
    """Return 1 / scale, of a power of two by its exponent; 2**-127 is subnormal."""
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        bits = tl.where(bits == 254 << 23, 1 << 22, (254 << 23) - bits)
        return finite_or_nan(bits.to(tl.float32, bitcast=True), scale)
    else:
        return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def fp8_tile_scales(block_amax, amax, E: tl.constexpr, OPTIONS: tl.constexpr):
    """Return decode, encode and decode scales in FP32, and 1. OPTIONS: (power-of-two scales,)."""
    scale = _fp8_scale(block_amax, E, OPTIONS[0])
    decode = _inverse(scale, OPTIONS[0])
    return decode, scale, decode, 1.0


@triton.jit
def fp8_row_scales(block_amax, amax, E: tl.constexpr, OPTIONS: tl.constexpr):
    """Return decode scales of rows, their reciprocals (0 of 0), the scales, 1. OPTIONS: unused."""
    scale = finite_or_nan(tl.div_rn(block_amax, tl.zeros_like(block_amax) + E.max), block_amax)
    factor = tl.where(scale == 0.0, 0.0, quotient(1.0, scale))
    return scale, factor, scale, 1.0


@triton.jit
def fp8_tensor_scales(block_amax, amax, E: tl.constexpr, OPTIONS: tl.constexpr):
    """Return 1, the encode scale, 1, the decode scale. OPTIONS: (power-of-two scales,)."""
    scale = _fp8_scale(amax, E, OPTIONS[0])
    return 1.0, scale, 1.0, _inverse(scale, OPTIONS[0])


@triton.jit
def fold_scales(scale, decode, amax, S: tl.constexpr):
    """Return the factors of blocks' codes, and the tensor scale, of a folded tensor."""
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    FOLD_SCALE: tl.constexpr = S.fold_scale
    if S.tensor_scaled:
        return scale * FOLD_SCALE, decode * (1.0 / FOLD_SCALE)
    else:
        amax = amax + tl.zeros((1,), tl.float32)
        _, _, top, _ = SCALES(amax, amax, E, OPTIONS)
        top = tl.sum(top, 0)
        # Powers of two, or NaN: exact. Only blocks of zeros may have a larger scale than the top.
        ratio = scale * tl.div_rn(tl.zeros_like(top) + 1.0, top)
        ratio = tl.minimum(ratio, 1.0, propagate_nan=tl.PropagateNan.ALL)
        return ratio * FOLD_SCALE, top * (1.0 / FOLD_SCALE) * decode
