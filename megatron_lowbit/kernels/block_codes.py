"""Device functions: codes of FP4 blocks whose scales depend on how their numbers are rounded.

A function takes the 16 lanes of blocks' rows, the blocks' and the tensor's amaxes, and the key and
numbers of the random words. It returns words of eight codes (two int32), the scales' codes, the
scales, and the tensor's decode scale, as ``numerics/`` says. MS-EDEN returns 16 elements in FP32 in
place of words if values are written. Sums are in the order of ``numerics/``. If a block has more
numbers, the scales' codes are a pair: of these 16, and the bits of the block's.
"""

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import (
    abs_bits,
    append_code,
    code_values,
    exact_bf16,
    known_parts,
    larger,
    round_nearest,
    round_to_grid,
    sign_code,
    signed,
    stochastic_codes,
)
from megatron_lowbit.kernels.random_words import philox, random_of
from megatron_lowbit.kernels.scales import (
    SIXTH,
    encode_scale,
    finite_or_nan,
    quotient,
    quotient_by,
    scale_code,
)

MSE = tl.constexpr(1)
ABS_MAX = tl.constexpr(3)


@triton.jit
def four_over_six(lanes, block_amax, amax, key, group, row, BELOW: tl.constexpr, S: tl.constexpr):
    """Take the scale that puts the block's amax at 6, or at 4 where the error is less."""
    OPTIONS: tl.constexpr = S.options
    s_enc, s_dec = encode_scale(amax, OPTIONS.top)
    base = tl.div_rn(block_amax, tl.zeros_like(block_amax) + OPTIONS.divisor) * s_enc
    base = finite_or_nan(base, block_amax)
    return _better(lanes, base, s_dec, amax, key, group, row, BELOW, S, _candidate)


@triton.jit
def _candidate(
    lanes, base, s_dec, amax, key, group, row, BELOW: tl.constexpr, S: tl.constexpr,
    DRAW: tl.constexpr,
):  # fmt: skip
    """Quantize blocks with their scales ``base`` rounded; return also the error of each block."""
    OPTIONS: tl.constexpr = S.options
    SELECTION: tl.constexpr = OPTIONS.selection
    E4M3: tl.constexpr = OPTIONS.element
    stored, scale = scale_code(round_nearest(base, E4M3), base, E4M3)
    factor = quotient(1.0, scale * s_dec)
    drawn = (group, group, group, group)
    if S.stochastic:
        drawn = philox(key, group, row, DRAW)
    words, error = (), base
    for i in tl.static_range(16):
        code, value = _rounded(lanes[i] * factor, drawn, i, S)
        words = append_code(words, code, i, 4)
        value = value * scale * amax
        if SELECTION == MSE:
            # Quotients that are subnormal may differ from IEEE's: their squares are zero.
            value = quotient_by(value, OPTIONS.top)
        else:
            value = tl.div_rn(value, tl.zeros_like(scale) + OPTIONS.top)
        term = tl.abs(value - tl.abs(lanes[i]))
        if SELECTION == MSE:
            term = term * term
        if i == 0:
            error = term
        elif SELECTION == ABS_MAX:
            error = larger(error, term)
        else:
            error += term
    return words, stored, scale, _over_rows(error, BELOW, S.block_rows, SELECTION)


@triton.jit
def quartet2(lanes, block_amax, amax, key, group, row, BELOW: tl.constexpr, S: tl.constexpr):
    """Take the scale that puts the block's amax at 6, or at 4 where the error is less."""
    OPTIONS: tl.constexpr = S.options
    tensor_scale = _tensor_scale(amax, OPTIONS)
    base = tl.div_rn(block_amax, tl.zeros_like(block_amax) + OPTIONS.divisor)
    return _better(lanes, base, tensor_scale, amax, key, group, row, BELOW, S, _quartet2_candidate)


@triton.jit
def _better(
    lanes, base, decode, amax, key, group, row, BELOW: tl.constexpr, S: tl.constexpr,
    CANDIDATE: tl.constexpr,
):  # fmt: skip
    """Quantize blocks by the scales ``base``, and by 1.5 times those where the error is less."""
    words, stored, scale, error = CANDIDATE(lanes, base, decode, amax, key, group, row, BELOW, S, 0)
    four, stored4, scale4, error4 = CANDIDATE(
        lanes, base * 1.5, decode, amax, key, group, row, BELOW, S, 1
    )
    less = error4 < error
    words = tl.where(less, four[0], words[0]), tl.where(less, four[1], words[1])
    return words, tl.where(less, stored4, stored), tl.where(less, scale4, scale), decode


@triton.jit
def _quartet2_candidate(
    lanes, base, tensor_scale, amax, key, group, row, BELOW: tl.constexpr, S: tl.constexpr,
    DRAW: tl.constexpr,
):  # fmt: skip
    """Quantize blocks with their scales ``base`` rounded; return also the error of each block."""
    stored, scale = _positive_scale(base, tensor_scale, S)
    step = scale * tensor_scale
    drawn = (group, group, group, group)
    if S.stochastic:
        drawn = philox(key, group, row, DRAW)
    words, error = (), base
    for i in tl.static_range(16):
        scaled = tl.div_rn(lanes[i], step)
        if S.stochastic:
            code, value = _rounded(scaled, drawn, i, S)
        else:
            code, value = _rounded(_above_ties(scaled), drawn, i, S)
        words = append_code(words, code, i, 4)
        term = value * step - tl.abs(lanes[i])
        error = term * term if i == 0 else error + term * term
    return words, stored, scale, error


@triton.jit
def ms_eden_quartet2(
    lanes, block_amax, amax, key, group, row, BELOW: tl.constexpr, S: tl.constexpr
):
    """Round numbers to nearest and scales, once they are corrected, stochastically."""
    OPTIONS: tl.constexpr = S.options
    tensor_scale = _tensor_scale(amax, OPTIONS)
    base = tl.div_rn(block_amax, tl.zeros_like(block_amax) + OPTIONS.divisor)
    _, scale = _positive_scale(base, tensor_scale, S)
    outs, correction = _corrected_elements(lanes, scale * tensor_scale, S, False)
    stored, scale = _drawn_scale(scale * correction, key, group, row, S)
    return outs, stored, scale, tensor_scale


@triton.jit
def ms_eden_torchao(lanes, block_amax, amax, key, group, row, BELOW: tl.constexpr, S: tl.constexpr):
    """Round as ``ms_eden_quartet2``, with torchao's scales, ties to even, and fused sums."""
    OPTIONS: tl.constexpr = S.options
    E4M3: tl.constexpr = OPTIONS.element
    s_enc, s_dec = encode_scale(amax, OPTIONS.top)
    base = finite_or_nan(block_amax * SIXTH * s_enc, block_amax)
    _, scale = scale_code(round_nearest(base, E4M3), base, E4M3)
    outs, correction = _corrected_elements(lanes, quotient(1.0, scale * s_dec), S, True)
    corrected = tl.where(scale == 0.0, 0.0, scale * correction)
    stored, scale = _drawn_scale(corrected, key, group, row, S)
    return outs, stored, scale, s_dec


@triton.jit
def tetrajet2(lanes, block_amax, amax, key, group, row, BELOW: tl.constexpr, S: tl.constexpr):
    """Quantize 16 of the 128 numbers that ``block_amax`` is of; return the scales of both."""
    OPTIONS: tl.constexpr = S.options
    E4M3: tl.constexpr = OPTIONS.element
    zero = tl.zeros_like(block_amax)
    outer = tl.div_rn(tl.div_rn(block_amax, zero + OPTIONS.top), zero + OPTIONS.divisor)
    outer = tl.where(block_amax == 0.0, 1.0, finite_or_nan(outer, block_amax))
    inner_amax = tl.abs(lanes[0])
    for i in tl.static_range(1, 16):
        inner_amax = larger(inner_amax, tl.abs(lanes[i]))
    base = tl.div_rn(tl.div_rn(inner_amax, outer), zero + OPTIONS.divisor)
    stored, scale = scale_code(round_nearest(base, E4M3), base, E4M3)
    drawn = (group, group, group, group)
    if S.stochastic:
        none = scale == 0.0
        stored, scale = tl.where(none, 1, stored), tl.where(none, 2.0**-9, scale)
        drawn = philox(key, group, row)
    step, words = outer * scale, ()
    for i in tl.static_range(16):
        scaled = tl.where(lanes[i] == 0.0, lanes[i], tl.div_rn(lanes[i], step))
        code, _ = _rounded(scaled, drawn, i, S)
        words = append_code(words, code, i, 4)
    bits = tl.where(outer == outer, outer.to(tl.int32, bitcast=True), 0x7FC00000)
    return words, (stored, bits), scale, 1.0


@triton.jit
def _corrected_elements(lanes, step, S: tl.constexpr, TORCHAO: tl.constexpr):
    """Round lanes over ``step``, or times it, to nearest; return the correction of scales, too."""
    E: tl.constexpr = S.element
    outs, squares, products = (), step, step
    for i in tl.static_range(16):
        if TORCHAO:
            scaled = lanes[i] * step
            magnitude, sign = known_parts(scaled)
        else:
            scaled = tl.div_rn(lanes[i], step)
            magnitude, sign = known_parts(_above_ties(scaled))
        code, value = round_to_grid(magnitude, magnitude, E, False)
        if S.values:
            outs = outs + (signed(value, sign),)
        else:
            outs = append_code(outs, code | sign_code(sign, E), i, 4)
        size = tl.abs(scaled)
        if i == 0:
            squares, products = size * size, size * value
        elif TORCHAO:
            squares, products = tl.fma(size, size, squares), tl.fma(size, value, products)
        else:
            squares, products = squares + size * size, products + size * value
    return outs, tl.where(products == 0.0, 1.0, tl.div_rn(squares, products))


@triton.jit
def _drawn_scale(corrected, key, group, row, S: tl.constexpr):
    """Return E4M3 codes and values of corrected scales, rounded stochastically if S says so."""
    OPTIONS: tl.constexpr = S.options
    E4M3: tl.constexpr = OPTIONS.element
    if S.stochastic:
        # 16 bits of the block's first number.
        w0, _, _, _ = philox(key, group * 2, row)
        random = w0.to(tl.int32, bitcast=True) & 0xFFFF
        value = code_values(stochastic_codes(corrected, random, E4M3), E4M3)
    else:
        value = round_nearest(corrected, E4M3)
    return scale_code(value, corrected, E4M3)


@triton.jit
def _tensor_scale(amax, OPTIONS: tl.constexpr):
    """Return amax / top / divisor, at least FP32's smallest number; 1 for zeros."""
    zero = tl.zeros_like(amax)
    scale = tl.div_rn(tl.div_rn(amax, zero + OPTIONS.top), zero + OPTIONS.divisor)
    # The smallest number as its bits: Triton takes such a constant for FP64.
    scale = tl.maximum(scale.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    return tl.where(amax == 0.0, 1.0, finite_or_nan(scale, amax))


@triton.jit
def _positive_scale(base, tensor_scale, S: tl.constexpr):
    """Return E4M3 codes of base / tensor_scale and their values, 1 in place of 0."""
    OPTIONS: tl.constexpr = S.options
    E4M3: tl.constexpr = OPTIONS.element
    scale = tl.div_rn(base, tl.zeros_like(base) + tensor_scale)
    scale = finite_or_nan(scale, base)
    value = round_nearest(scale, E4M3)
    return scale_code(tl.where(value == 0.0, 1.0, value), scale, E4M3)


@triton.jit
def _above_ties(x):
    """Raise magnitudes whose last bit is 0: ties, which are even, round away from zero."""
    return (x.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x, drawn, i: tl.constexpr, S: tl.constexpr):
    """Round the i-th lanes of blocks; return codes, and their magnitudes.

    They are zeros for NaN: a zero over a step of zero, or what is not finite.
    """
    E: tl.constexpr = S.element
    BITS: tl.constexpr = E.random_bits
    random = x
    if S.stochastic:
        random = random_of(drawn, i, BITS)
    magnitude, sign = known_parts(x)
    code, value = round_to_grid(magnitude, random, E, S.stochastic)
    return code | sign_code(sign, E), value


@triton.jit
def _over_rows(error, BELOW: tl.constexpr, ROWS: tl.constexpr, SELECTION: tl.constexpr):
    """Reduce the errors of rows to errors of their blocks, for each row.

    Rows of a block are ``BELOW`` apart. Sums are of rows i and i + 8, then i and i + 4, and so on.
    """
    if ROWS > 1:
        N: tl.constexpr = error.shape[0]
        BLOCKS: tl.constexpr = N // (ROWS * BELOW)
        if SELECTION == ABS_MAX:
            bits = tl.reshape(abs_bits(error), (BLOCKS, ROWS, BELOW))
            reduced = tl.max(bits, 1).to(tl.float32, bitcast=True)
        else:
            reduced = _sum_rows(tl.reshape(error, (BLOCKS, ROWS, BELOW)), BLOCKS, ROWS, BELOW)
        error = tl.reshape(tl.broadcast_to(reduced[:, None, :], (BLOCKS, ROWS, BELOW)), (N,))
    return error


@triton.jit
def _sum_rows(x, A: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr):
    """Sum [A, ROWS, B] to [A, B], the lower half added to the upper one."""
    if ROWS == 1:
        return tl.reshape(x, (A, B))
    else:
        HALF: tl.constexpr = ROWS // 2
        return _sum_rows(tl.sum(tl.reshape(x, (A, 2, HALF, B)), 1), A, HALF, B)


@triton.jit
def bf16_of(outs, scale, E: tl.constexpr):
    """Return 16 elements times their scales in BF16; ``outs`` may have them as words of codes."""
    values = ()
    for i in tl.static_range(16):
        if len(outs) == 2:
            code = outs[i // 8] >> i % 8 * 4
            value = signed(code_values(code & 7, E), (code << 28) & -0x80000000)
        else:
            value = outs[i]
        values = values + (exact_bf16(value * scale, E),)
    return values
