"""Quantization on a GPU: a matrix and its transpose in one pass, bit for bit as ``numerics/`` says.

A program takes a tile of the matrix. A side with blocks is computed on points (see ``tiles.py``):
the amaxes of up to 64 neighbours, butterflies and random bits then stay within a thread. Sides
without blocks and longer transforms are computed on the tile as one tensor.
"""

from collections.abc import Callable
from typing import NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.delayed import delayed_amax, note_amax
from megatron_lowbit.kernels.elements import (
    Element,
    abs_bits,
    block_amax,
    code_pair,
    encode,
    encode_pair,
    exact_bf16,
    fold_ratio,
    join_pairs,
    larger,
    over_block,
    over_rows,
    rounded,
)
from megatron_lowbit.kernels.hadamard import Transform, transform_points, transform_tile
from megatron_lowbit.kernels.random_words import key_of, number, philox, random_of, random_tile
from megatron_lowbit.kernels.sections import (
    COL_CODES,
    COL_COLUMNS,
    COL_KEY,
    COL_SCALES,
    COL_SIGNS,
    FIRST_TILE,
    QUANTIZE_FIELDS,
    ROW_CODES,
    ROW_KEY,
    ROW_SCALES,
    ROW_SIGNS,
    ROWS,
    X,
    entry,
    pointer,
    section_of,
)
from megatron_lowbit.kernels.tiles import (
    load_column_points,
    load_row_points,
    load_tile,
    side_by_side,
    store_groups,
    store_tile,
)


class Side(NamedTuple):
    """Quantization of one side, as a constexpr.

    ``block`` is 1 for a format without block scales; one that is ``row_scaled`` has the scale of a
    row from the row's amax in its place. ``points``: the neighbours that make a group;
    0 for a tile as one tensor. ``values``: write BF16 elements times block scales, in the matrix's
    own layout on both sides, in place of codes and scales. ``fold``: write codes of this element,
    folded with the factor ``lift`` (``numerics/folding.py``), and no block scales; ``bound`` times
    the amax is a number that no element exceeds.
    """

    scales: Callable
    block_rows: int
    block: int
    row_scaled: bool
    repeats_scales: bool
    tensor_scaled: bool
    element: Element
    options: tuple
    stochastic: bool
    transform: Transform | None
    points: int
    values: bool
    fold: Element | None
    lift: float
    bound: float


@triton.jit(do_not_specialize=["r_key", "r_signs", "c_key", "c_signs"])
def quantize_kernel(
    x, stride_r, stride_c, R, C, own, table,
    r_columns, r_amax, r_codes, r_scales, r_tensor_scale, r_key, r_rows, r_groups, r_signs,
    c_columns, c_amax, c_codes, c_scales, c_tensor_scale, c_key, c_rows, c_groups, c_signs,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Quantize x (R, C) by ROW (arguments r_) and its transpose by COL (c_); either may be None.

    ``columns`` is the length of a row of codes in elements: whole blocks and transforms. ``rows``
    and ``groups`` are global numbers for the random bits, or None as ``amax`` is where unused; that
    is the tensor's, or of each row. ``own`` takes x's amax where scaling is delayed, else None.
    Keys and signs are int64, or in memory. Tiles are TM x TN; with EVEN they cover x exactly.

    A ``table`` in COUNT columns (see ``sections.py``) has matrices to quantize in place of x. Of
    the arguments that it replaces, pointers tell the dtype; amaxes and tensor scales are arrays.
    """
    tiles = tl.cdiv(C, TN)
    tile = tl.program_id(0) // tiles
    col0 = (tl.program_id(0) % tiles) * TN
    first_program = 0
    if table is not None:
        section = section_of(table, tile, QUANTIZE_FIELDS, COUNT)
        first_tile = entry(table, section, FIRST_TILE, COUNT).to(tl.int32)
        first_program, tile = first_tile * tiles, tile - first_tile
        x = pointer(table, section, X, COUNT, x)
        R = entry(table, section, ROWS, COUNT).to(tl.int32)
        r_key = entry(table, section, ROW_KEY, COUNT)
        r_signs = entry(table, section, ROW_SIGNS, COUNT)
        c_key = entry(table, section, COL_KEY, COUNT)
        c_signs = entry(table, section, COL_SIGNS, COUNT)
        if ROW is not None:
            r_codes = pointer(table, section, ROW_CODES, COUNT, r_codes)
            r_tensor_scale += section
            if r_scales is not None:
                r_scales = pointer(table, section, ROW_SCALES, COUNT, r_scales)
            if r_amax is not None:
                r_amax += section
        if COL is not None:
            c_columns = entry(table, section, COL_COLUMNS, COUNT).to(tl.int32)
            if COL.block % 16 == 0:
                c_columns = tl.multiple_of(c_columns, 16)
            c_codes = pointer(table, section, COL_CODES, COUNT, c_codes)
            c_tensor_scale += section
            if c_scales is not None:
                c_scales = pointer(table, section, COL_SCALES, COUNT, c_scales)
            if c_amax is not None:
                c_amax += section
    row0 = tile * TM
    if own is not None:
        note_amax(own, load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN))
    if ROW is not None:
        r_key = key_of(r_key)
        if ROW.points > 0:
            P: tl.constexpr = ROW.points
            points = load_row_points(x, stride_r, stride_c, row0, col0, R, C, TM, TN, P, EVEN)
            place = tl.arange(0, TM * TN // P)
            _points_side(
                points, row0 + place // (TN // P), col0 // P + place % (TN // P), R, r_columns,
                r_amax, r_codes, r_scales, r_tensor_scale, r_key, r_rows, r_groups, r_signs,
                first_program, TN // P, ROW, False, EVEN,
            )  # fmt: skip
        else:
            values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
            tile_side(
                values, None, row0, col0, R, r_columns, r_amax, r_codes, r_scales, r_tensor_scale,
                r_key, r_rows, r_groups, r_signs, TM, TN, ROW, False, EVEN, own, first_program,
            )  # fmt: skip
    if COL is not None:
        c_key = key_of(c_key)
        if COL.points > 0:
            Q: tl.constexpr = COL.points
            points = load_column_points(x, stride_r, stride_c, row0, col0, R, C, TM, TN, Q, EVEN)
            place = tl.arange(0, TM // Q * TN)
            _points_side(
                points, col0 + place % TN, row0 // Q + place // TN, C, c_columns,
                c_amax, c_codes, c_scales, c_tensor_scale, c_key, c_rows, c_groups, c_signs,
                first_program, TN, COL, True, EVEN,
            )  # fmt: skip
        else:
            values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
            tile_side(
                tl.trans(values), None, col0, row0, C, c_columns, c_amax, c_codes, c_scales,
                c_tensor_scale, c_key, c_rows, c_groups, c_signs, TN, TM, COL, True, EVEN, own,
                first_program,
            )  # fmt: skip


@triton.jit
def _points_side(
    points, r, group, R, columns, amax, codes, scales, tensor_scale, key, rows, groups, signs,
    first_program, WIDE: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize groups of points: the ``group``-th of row ``r`` of x, or of its TRANSPOSED.

    Groups come in the order of the tile, which has ``WIDE`` of them from left to right.
    """
    H: tl.constexpr = S.transform
    P: tl.constexpr = S.points
    BLOCK: tl.constexpr = S.block
    if S.transform is not None:
        points = transform_points(points, signs, P, H)
    amax = tl.load(amax) * S.bound if amax is not None else 0.0
    row_number = number(rows, r, R)
    if P <= BLOCK:
        _block(points, 0, r, group, row_number, R, columns, amax, codes, scales, tensor_scale, key,
               groups, first_program, WIDE, S, TRANSPOSED, EVEN)  # fmt: skip
    else:
        # A loop, for Triton's sake: compiled once, and apart from the transform.
        for first in range(0, P, BLOCK):
            _block(points, first, r, group, row_number, R, columns, amax, codes, scales,
                   tensor_scale, key, groups, first_program, WIDE, S, TRANSPOSED,
                   EVEN)  # fmt: skip
            points = points[BLOCK:] + points[:BLOCK]


@triton.jit
def _block(
    points, first, r, group, row_number, R, columns, amax, codes, scales, tensor_scale, key, groups,
    first_program, WIDE: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize the first block of ``points``, or all of them where a block has several groups.

    ``first`` is the place of the first point in its group.
    """
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    BLOCK: tl.constexpr = S.block
    ROWS: tl.constexpr = S.block_rows
    LENGTH: tl.constexpr = S.points if S.points < S.block else S.block
    most = _block_most(points, LENGTH, WIDE, S, TRANSPOSED)
    stored, factor, scale, decode = SCALES(most, amax, E, OPTIONS)
    if S.fold is not None:
        scale, decode = fold_scales(scale, decode, amax, S)
    at = group * S.points + first
    outs = _encoded(points, factor, scale, at, row_number, columns, key, groups, LENGTH, S)
    if S.values and TRANSPOSED:
        for i in tl.static_range(LENGTH):
            store_groups(codes, outs[i][:, None], at + i, r, columns, R, EVEN)
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
def _block_most(
    points, LENGTH: tl.constexpr, WIDE: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Return the largest magnitude of LENGTH points, with all groups that share their block."""
    # Groups of the tile that have a block in common, from top to bottom and from left to right.
    DOWN: tl.constexpr = S.block // LENGTH if TRANSPOSED else S.block_rows
    ACROSS: tl.constexpr = S.block_rows if TRANSPOSED else S.block // LENGTH
    N: tl.constexpr = points[0].shape[0]
    most = tl.abs(points[0])
    for i in tl.static_range(1, LENGTH):
        most = larger(most, tl.abs(points[i]))
    if DOWN * ACROSS > 1:
        shape: tl.constexpr = (N // (WIDE * DOWN), DOWN, WIDE // ACROSS, ACROSS)
        bits = tl.max(tl.max(tl.reshape(abs_bits(most), shape), 3), 1)
        bits = tl.reshape(tl.broadcast_to(bits[:, None, :, None], shape), (N,))
        most = bits.to(tl.float32, bitcast=True)
    return most


@triton.jit
def _encoded(
    points, factor, scale, at, row_number, columns, key, groups, LENGTH: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Return what is written of LENGTH points: BF16 values, or words of codes (int32)."""
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
            low = code_pair(points[i] * factor, points[i + 1] * factor, scale, E, FOLD)
            high = code_pair(points[i + 2] * factor, points[i + 3] * factor, scale, E, FOLD)
            outs = outs + (join_pairs(low, high),)
    else:
        values = ()
        words = (at, at, at, at)
        word = at
        PER: tl.constexpr = 8 if E.bits == 4 else 4
        for i in tl.static_range(LENGTH):
            x = points[i] * factor
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


@triton.jit
def fold_scales(scale, decode, amax, S: tl.constexpr):
    """Return the factors of blocks' codes, and the tensor scale, of a folded tensor."""
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    LIFT: tl.constexpr = S.lift
    if S.tensor_scaled:
        return scale * LIFT, decode * (1.0 / LIFT)
    else:
        amax = amax + tl.zeros((1,), tl.float32)
        _, _, top, _ = SCALES(amax, amax, E, OPTIONS)
        top = tl.sum(top, 0)
        return fold_ratio(scale, top) * LIFT, top * (1.0 / LIFT) * decode


@triton.jit
def tile_side(
    x, most, row0, col0, R, columns, amax, codes, scales, tensor_scale, key, rows, groups, signs,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr, own=None, first_program=0,
):  # fmt: skip
    """Quantize a tile [A, B] of x, or of its TRANSPOSED, which has R rows.

    ``most`` are its blocks' or rows' largest magnitudes, where they are known. ``own`` is the
    tensor's amax for a scale a tensor that is delayed; ``first_program`` writes the tensor scale.
    """
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    F: tl.constexpr = S.fold
    H: tl.constexpr = S.transform
    if S.transform is not None:
        x = transform_tile(x, signs, A, B, H)
    random = x
    if S.stochastic:
        row_numbers = number(rows, row0 + tl.arange(0, A), R)
        group_numbers = number(groups, col0 // 16 + tl.arange(0, B // 16), tl.cdiv(columns, 16))
        BITS: tl.constexpr = E.random_bits
        random = random_tile(key, row_numbers, group_numbers, A, B, BITS)
    if S.row_scaled:
        r = row0 + tl.arange(0, A)
        if most is None:
            most = tl.load(amax + r, mask=r < R, other=0.0)
        stored, factor, scale, decode = SCALES(most, most, E, OPTIONS)
        x = x * factor[:, None]
        # The tiles of a row have the same; the first writes it.
        if col0 == 0:
            tl.store(scales + r, stored, mask=r < R)
    elif S.block > 1:
        amax = tl.load(amax) * S.bound if amax is not None else 0.0
        if most is None:
            most = block_amax(x, A, B, S.block_rows, S.block)
        stored, factor, scale, decode = SCALES(most, amax, E, OPTIONS)
        x = x * over_block(factor, A, B, S.block_rows, S.block)
        if S.fold is not None:
            scale, decode = fold_scales(scale, decode, amax, S)
            wide = over_block(scale, A, B, S.block_rows, S.block)
            x = rounded(x, random, E, S.stochastic) * wide
            store_tile(codes, encode(x, x, F, False), row0, col0, R, columns, EVEN)
        elif S.values:
            wide = over_block(scale, A, B, S.block_rows, S.block)
            value = rounded(x, random, E, S.stochastic) * wide
            value = exact_bf16(value, E)
            if TRANSPOSED:
                store_tile(codes, tl.trans(value), col0, row0, columns, R, EVEN)
            else:
                store_tile(codes, value, row0, col0, R, columns, EVEN)
        else:
            if stored.dtype == tl.int32:
                stored = over_rows(stored, A, B // S.block, S.block_rows)
            step: tl.constexpr = A // stored.shape[0]
            store_tile(scales, stored, row0 // step, col0 // S.block, tl.cdiv(R, step),
                       columns // S.block, EVEN)  # fmt: skip
    else:
        amax = tl.load(amax) if own is None else delayed_amax(amax, own)
        _, factor, scale, decode = SCALES(amax, amax, E, OPTIONS)
        x = x * factor
    if not S.values and S.fold is None:
        code = encode(x, random, E, S.stochastic)
        if E.bits == 4:
            low, high = tl.split(tl.reshape(code, (A, B // 2, 2)))
            store_tile(codes, low | (high << 4), row0, col0 // 2, R, columns // 2, EVEN)
        else:
            store_tile(codes, code, row0, col0, R, columns, EVEN)
    if tl.program_id(0) == first_program:
        tl.store(tensor_scale, decode)
