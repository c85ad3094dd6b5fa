"""Quantization on a GPU: a matrix and its transpose in one pass, bit for bit as ``numerics/`` says.

A program takes a tile of the matrix. A side with blocks is computed on lanes (see ``tiles.py``):
the amaxes of up to 64 neighbours, butterflies and random bits then stay within a thread. Sides
without blocks and longer transforms are computed on the tile as one tensor.
"""

from collections.abc import Callable
from typing import NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.delayed import atomic_amax
from megatron_lowbit.kernels.elements import Element
from megatron_lowbit.kernels.hadamard import Transform
from megatron_lowbit.kernels.quantize_lanes import lanes_side
from megatron_lowbit.kernels.quantize_tile import tile_side
from megatron_lowbit.kernels.random_words import key_of
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
from megatron_lowbit.kernels.tiles import load_column_lanes, load_row_lanes, load_tile


class QuantizeSpec(NamedTuple):
    """Quantization of one side, as a constexpr.

    ``scales`` is a function of ``scales.py``, or, where ``from_numbers``, of ``block_codes.py``.
    ``block`` is 1 for a format without block scales; one that is ``row_scaled`` has the scale of a
    row from the row's amax in its place. ``lanes``: the neighbours that make a group;
    0 for a tile as one tensor. ``values``: write BF16 elements times block scales, in the matrix's
    own layout on both sides, in place of codes and scales. ``fold``: write codes of this element,
    folded with the factor ``fold_scale`` (``numerics/folding.py``), and no block scales; ``bound``
    times the amax is a number that no element exceeds.
    """

    scales: Callable
    from_numbers: bool
    block_rows: int
    block: int
    row_scaled: bool
    repeats_scales: bool
    tensor_scaled: bool
    element: Element
    options: tuple
    stochastic: bool
    transform: Transform | None
    lanes: int
    values: bool
    fold: Element | None
    fold_scale: float
    bound: float


@triton.jit(do_not_specialize=["r_key", "r_signs", "c_key", "c_signs"])
def quantize_kernel(
    x, stride_r, stride_c, R, C, current_amax, table, tiles_done,
    r_columns, r_amax, r_codes, r_scales, r_tensor_scale, r_key, r_rows, r_groups, r_signs,
    c_columns, c_amax, c_codes, c_scales, c_tensor_scale, c_key, c_rows, c_groups, c_signs,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Quantize x (R, C) by ROW (arguments r_) and its transpose by COL (c_); either may be None.

    ``columns`` is the length of a row of codes in elements: whole blocks and transforms. ``rows``
    and ``groups`` are global numbers for the random bits, or None as ``amax`` is where unused; that
    is the tensor's, or of each row. ``current_amax`` takes x's amax where scaling is delayed, else
    None. Keys and signs are int64, or in memory. Tiles are TM x TN; with EVEN they cover x exactly.

    A ``table`` in COUNT columns (see ``sections.py``) has matrices to quantize in place of x. Of
    the arguments that it replaces, pointers tell the dtype; amaxes and tensor scales are arrays.
    With ``tiles_done``, zeroed counts of each matrix's tiles, amaxes are zeroed as well, and those
    of the matrices as they are: programs take them, and all of a matrix wait for each other, so
    that they must run at the same time.
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
    if tiles_done is not None:
        _grid_amax(
            c_amax if r_amax is None else r_amax,
            load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN),
            tiles_done + section, row0 < R, tl.cdiv(R, TM) * tiles,
        )  # fmt: skip
    if current_amax is not None:
        atomic_amax(current_amax, load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN))
    if ROW is not None:
        r_key = key_of(r_key)
        if ROW.lanes > 0:
            P: tl.constexpr = ROW.lanes
            lanes = load_row_lanes(x, stride_r, stride_c, row0, col0, R, C, TM, TN, P, EVEN)
            place = tl.arange(0, TM * TN // P)
            lanes_side(
                lanes, row0 + place // (TN // P), col0 // P + place % (TN // P), R, r_columns,
                r_amax, r_codes, r_scales, r_tensor_scale, r_key, r_rows, r_groups, r_signs,
                first_program, TN // P, ROW, False, EVEN,
            )  # fmt: skip
        else:
            values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
            tile_side(
                values, None, row0, col0, R, r_columns, r_amax, r_codes, r_scales, r_tensor_scale,
                r_key, r_rows, r_groups, r_signs, TM, TN, ROW, False, EVEN, current_amax,
                first_program,
            )  # fmt: skip
    if COL is not None:
        c_key = key_of(c_key)
        if COL.lanes > 0:
            Q: tl.constexpr = COL.lanes
            lanes = load_column_lanes(x, stride_r, stride_c, row0, col0, R, C, TM, TN, Q, EVEN)
            place = tl.arange(0, TM // Q * TN)
            lanes_side(
                lanes, col0 + place % TN, row0 // Q + place // TN, C, c_columns,
                c_amax, c_codes, c_scales, c_tensor_scale, c_key, c_rows, c_groups, c_signs,
                first_program, TN, COL, True, EVEN,
            )  # fmt: skip
        else:
            values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
            tile_side(
                tl.trans(values), None, col0, row0, C, c_columns, c_amax, c_codes, c_scales,
                c_tensor_scale, c_key, c_rows, c_groups, c_signs, TN, TM, COL, True, EVEN,
                current_amax, first_program,
            )  # fmt: skip


@triton.jit
def _grid_amax(amax, values, tiles_done, counts, tiles):
    """Raise a matrix's amax by a tile that ``counts``; return when all its ``tiles`` have done so.

    ``tiles_done`` is the number of those that have.
    """
    if counts:
        atomic_amax(amax.to(tl.pointer_type(tl.int32), bitcast=True), values)
        tl.atomic_add(tiles_done, 1)
    while tl.atomic_add(tiles_done, 0, sem="acquire") < tiles:
        pass
