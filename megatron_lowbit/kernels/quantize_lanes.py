"""Device functions: quantization of a side on lanes (see ``tiles.py``)."""

import triton
import triton.language as tl

from megatron_lowbit.kernels.block_codes import bf16_of_words
from megatron_lowbit.kernels.elements import (
    abs_bits,
    code_pair,
    encode,
    encode_pair,
    exact_bf16,
    join_pairs,
    larger,
    rounded,
)
from megatron_lowbit.kernels.hadamard import transform_lanes
from megatron_lowbit.kernels.random_words import number, philox, random_of
from megatron_lowbit.kernels.scales import fold_scales
from megatron_lowbit.kernels.tiles import side_by_side, store_groups


@triton.jit
def lanes_side(
    lanes, r, group, R, columns, amax, codes, scales, tensor_scale, key, rows, groups, signs,
    first_program, WIDE: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize groups of lanes: the ``group``-th of row ``r`` of x, or of its TRANSPOSED.

    Groups come in the order of the tile, which has ``WIDE`` of them from left to right.
    """
    H: tl.constexpr = S.transform
    P: tl.constexpr = S.lanes
    BLOCK: tl.constexpr = S.block
    if S.transform is not None:
        lanes = transform_lanes(lanes, signs, P, H)
    amax = tl.load(amax) * S.bound if amax is not None else 0.0
    row_number = number(rows, r, R)
    if P <= BLOCK:
        quantize_block(lanes, 0, r, group, row_number, R, columns, amax, codes, scales,
                       tensor_scale, key, groups, first_program, WIDE, S, TRANSPOSED,
                       EVEN)  # fmt: skip
    else:
        # A loop, for Triton's sake: compiled once, and apart from the transform.
        for first in range(0, P, BLOCK):
            quantize_block(lanes, first, r, group, row_number, R, columns, amax, codes,
                           scales, tensor_scale, key, groups, first_program, WIDE, S, TRANSPOSED,
                           EVEN)  # fmt: skip
            lanes = lanes[BLOCK:] + lanes[:BLOCK]


@triton.jit
def quantize_block(
    lanes, first, r, group, row_number, R, columns, amax, codes, scales, tensor_scale, key, groups,
    first_program, WIDE: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize the first block of ``lanes``, or all of them where a block has several groups.

    ``first`` is the place of the first lane in its group, or in its row where S has no lanes.
    """
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    BLOCK: tl.constexpr = S.block
    ROWS: tl.constexpr = S.block_rows
    WHOLE: tl.constexpr = S.from_numbers or S.lanes > S.block
    LENGTH: tl.constexpr = S.block if WHOLE else S.lanes
    block_amax = _block_amax_of(lanes, LENGTH, WIDE, S, TRANSPOSED)
    if S.from_numbers:
        at = group * S.lanes + first
        BELOW: tl.constexpr = 1 if TRANSPOSED else WIDE
        group_number = number(groups, at // 16, tl.cdiv(columns, 16))
        outs, stored, scale, decode = SCALES(
            lanes, block_amax, amax, key, group_number, row_number, BELOW, S
        )
        if S.values:
            outs = bf16_of_words(outs, scale, E)
    else:
        stored, factor, scale, decode = SCALES(block_amax, amax, E, OPTIONS)
        if S.fold is not None:
            scale, decode = fold_scales(scale, decode, amax, S)
        at = group * S.lanes + first
        outs = _encoded(lanes, factor, scale, at, row_number, columns, key, groups, LENGTH, S)
    if S.values and TRANSPOSED:
        # One store in a loop compiles sooner than many: see load_column_lanes.
        for i in range(0, LENGTH):
            store_groups(codes, outs[0][:, None], at + i, r, columns, R, EVEN)
            outs = outs[1:] + outs[:1]
    elif S.values:
        store_groups(codes, side_by_side(outs, LENGTH), r, at, R, columns, EVEN)
    else:
        PER: tl.constexpr = 8 if E.bits == 4 and S.fold is None else 4
        packed = side_by_side(outs, LENGTH // PER)
        store_groups(codes, packed, r, at // PER, R, columns // PER, EVEN)
        if S.fold is None and S.repeats_scales:
            store_groups(scales, stored[:, None], r, at // BLOCK, R, columns // BLOCK, EVEN)
        elif S.fold is None:
            # Scales of 1xN blocks with rows fastest; one of each block.
            block = at // BLOCK
            place = r // ROWS * (columns // BLOCK) + block if ROWS > 1 else block * R + r
            alone = (at % BLOCK == 0) & (r % ROWS == 0) & (r < R) & (at < columns)
            tl.store(scales + place, stored, mask=alone)
    # Every program has the same; the first writes it.
    if tl.program_id(0) == first_program:
        tl.store(tensor_scale, decode)


@triton.jit
def _block_amax_of(
    lanes, LENGTH: tl.constexpr, WIDE: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Return the largest magnitude of LENGTH lanes, with all groups that share their block."""
    # Groups of the tile that have a block in common, from top to bottom and from left to right.
    DOWN: tl.constexpr = S.block // LENGTH if TRANSPOSED else S.block_rows
    ACROSS: tl.constexpr = S.block_rows if TRANSPOSED else S.block // LENGTH
    N: tl.constexpr = lanes[0].shape[0]
    block_amax = tl.abs(lanes[0])
    for i in tl.static_range(1, LENGTH):
        block_amax = larger(block_amax, tl.abs(lanes[i]))
    if DOWN * ACROSS > 1:
        shape: tl.constexpr = (N // (WIDE * DOWN), DOWN, WIDE // ACROSS, ACROSS)
        bits = tl.max(tl.max(tl.reshape(abs_bits(block_amax), shape), 3), 1)
        bits = tl.reshape(tl.broadcast_to(bits[:, None, :, None], shape), (N,))
        block_amax = bits.to(tl.float32, bitcast=True)
    return block_amax


@triton.jit
def _encoded(
    lanes, factor, scale, at, row_number, columns, key, groups, LENGTH: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Return what is written of LENGTH lanes: BF16 values, or words of codes (int32)."""
    E: tl.constexpr = S.element
    F: tl.constexpr = S.fold
    FOLD: tl.constexpr = S.fold is not None
    BITS: tl.constexpr = E.random_bits
    # Philox blocks of a group of 16, and elements of one.
    CALLS: tl.constexpr = BITS // 8
    DRAWN: tl.constexpr = 128 // BITS
    outs = ()
    if E.bits == 8 and not S.stochastic and not S.values:
        for i in tl.static_range(0, LENGTH, 4):
            low = code_pair(lanes[i] * factor, lanes[i + 1] * factor, scale, E, FOLD)
            high = code_pair(lanes[i + 2] * factor, lanes[i + 3] * factor, scale, E, FOLD)
            outs = outs + (join_pairs(low, high),)
    else:
        values = ()
        words = (at, at, at, at)
        word = at
        PER: tl.constexpr = 8 if E.bits == 4 else 4
        for i in tl.static_range(LENGTH):
            x = lanes[i] * factor
            random = x
            if S.stochastic:
                if i % DRAWN == 0:
                    group_number = number(groups, (at + i) // 16, tl.cdiv(columns, 16))
                    words = philox(key, group_number * CALLS + i // DRAWN % CALLS, row_number)
                random = random_of(words, i % DRAWN, BITS)
            if S.values:
                outs = outs + (exact_bf16(rounded(x, random, E, S.stochastic) * scale, E),)
            elif FOLD:
                values = values + (rounded(x, random, E, S.stochastic) * scale,)
            else:
                code = encode(x, random, E, S.stochastic) << ((i % PER) * (32 // PER))
                word = code if i % PER == 0 else word | code
                if i % PER == PER - 1:
                    outs = outs + (word,)
        for i in tl.static_range(0, LENGTH if FOLD else 0, 4):
            low = encode_pair(values[i], values[i + 1], F)
            outs = outs + (join_pairs(low, encode_pair(values[i + 2], values[i + 3], F)),)
    return outs
