"""Quantization on a GPU: a matrix and its transpose in one pass, bit for bit as ``numerics/`` says.

A program takes a tile of the matrix. A side with blocks is computed on lanes (see ``tiles.py``):
the amaxes of up to 64 neighbours, butterflies and random bits then stay within a thread. Sides
without blocks and longer transforms are computed on the tile as one tensor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.amax import atomic_amax, grid_amax
from megatron_lowbit.kernels.elements import Element
from megatron_lowbit.kernels.hadamard import Transform
from megatron_lowbit.kernels.quantize_side import lanes_side, tile_side
from megatron_lowbit.kernels.random_words import key_of
from megatron_lowbit.kernels.sections import (
    CODES,
    COL_FIELDS,
    COLUMNS,
    FIRST_TILE,
    KEY,
    QUANTIZE_FIELDS,
    ROW_FIELDS,
    ROWS,
    SCALES,
    SIGNS,
    X,
    entry,
    pointer,
    section_of,
)
from megatron_lowbit.kernels.tiles import load_column_lanes, load_row_lanes, load_tile


class QuantizeSpec(NamedTuple):
    """Quantization of one side, as a constexpr.

    ``scales`` is a function of ``scales.py``, or, where ``from_numbers``, of ``block_codes.py``.
    ``block`` is 1 for a format without block scales. One that is ``row_scaled`` has a scale from
    the amax of a row in their place, or in place of the tensor's. ``lanes``: the neighbours that
    make a group, or 0 for a tile as one tensor, and ``block_lanes`` the lanes of a block quantized
    at once. ``values``: write BF16 elements times block scales, in the matrix's own layout on both
    sides, in place of codes and scales. ``fold``: write codes of this element, folded with the
    factor ``fold_scale`` (``numerics/folding.py``), and no block scales; ``bound`` times the amax
    is a number that no element exceeds.
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
    block_lanes: int
    values: bool
    fold: Element | None
    fold_scale: float
    bound: float


class SideArguments(NamedTuple):
    """Arguments of a kernel for one side; by default, for a side that is not wanted.

    ``columns`` is the length of a row of codes in elements: whole blocks and transforms. ``amax``
    is the tensor's, or of each row. ``rows`` and ``groups`` are global numbers for the random bits,
    None where they count from zero. Keys and signs are int64, or in memory.
    """

    columns: Any = 0
    amax: Any = None
    codes: Any = None
    scales: Any = None
    tensor_scale: Any = None
    key: Any = 0
    rows: Any = None
    groups: Any = None
    signs: Any = 0


@triton.jit(do_not_specialize=["r_key", "r_signs", "c_key", "c_signs"])
def quantize_kernel(
    x, stride_r, stride_c, R, C, current_amax, table, tiles_done, tokens,
    r_columns, r_amax, r_codes, r_scales, r_tensor_scale, r_key, r_rows, r_groups, r_signs,
    c_columns, c_amax, c_codes, c_scales, c_tensor_scale, c_key, c_rows, c_groups, c_signs,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Quantize x (R, C) by the spec ROW and its transpose by COL; either may be None.

    ``current_amax`` takes x's amax where scaling is delayed, else None. Tiles are TM x TN; with
    EVEN they cover x exactly.

    A ``table`` in COUNT columns (see ``sections.py``) has matrices to quantize in place of x. Of
    the arguments that it replaces, pointers tell the dtype; amaxes and tensor scales are arrays.
    With ``tiles_done``, zeroed counts of each matrix's tiles, amaxes are zeroed as well, and those
    of the matrices as they are: programs take them, and all of a matrix wait for each other, so
    that they must run at the same time. With ``tokens``, int32, a matrix has the rows of x that
    they name from the one on that the table says.
    """
    tiles = tl.cdiv(C, TN)
    tile = tl.program_id(0) // tiles
    col0 = (tl.program_id(0) % tiles) * TN
    first_program = 0
    if table is not None:
        section = section_of(table, tile, QUANTIZE_FIELDS, COUNT)
        if section < 0:
            return
        first_tile = entry(table, section, FIRST_TILE, COUNT).to(tl.int32)
        first_program, tile = first_tile * tiles, tile - first_tile
        if tokens is None:
            x = pointer(table, section, X, COUNT, x)
        else:
            tokens += entry(table, section, X, COUNT)
        R = entry(table, section, ROWS, COUNT).to(tl.int32)
        if ROW is not None:
            r_codes = pointer(table, section, ROW_FIELDS + CODES, COUNT, r_codes)
            if r_scales is not None:
                r_scales = pointer(table, section, ROW_FIELDS + SCALES, COUNT, r_scales)
            r_amax = None if r_amax is None else r_amax + section
            r_tensor_scale += section
            r_key = entry(table, section, ROW_FIELDS + KEY, COUNT)
            r_signs = entry(table, section, ROW_FIELDS + SIGNS, COUNT)
        if COL is not None:
            c_columns = entry(table, section, COL_FIELDS + COLUMNS, COUNT).to(tl.int32)
            if COL.block % 16 == 0:
                c_columns = tl.multiple_of(c_columns, 16)
            c_codes = pointer(table, section, COL_FIELDS + CODES, COUNT, c_codes)
            if c_scales is not None:
                c_scales = pointer(table, section, COL_FIELDS + SCALES, COUNT, c_scales)
            c_amax = None if c_amax is None else c_amax + section
            c_tensor_scale += section
            c_key = entry(table, section, COL_FIELDS + KEY, COUNT)
            c_signs = entry(table, section, COL_FIELDS + SIGNS, COUNT)
    row = SideArguments(r_columns, r_amax, r_codes, r_scales, r_tensor_scale, key_of(r_key),
                        r_rows, r_groups, key_of(r_signs))  # fmt: skip
    col = SideArguments(c_columns, c_amax, c_codes, c_scales, c_tensor_scale, key_of(c_key),
                        c_rows, c_groups, key_of(c_signs))  # fmt: skip
    row0 = tile * TM
    if tiles_done is not None:
        grid_amax(
            c_amax if r_amax is None else r_amax,
            load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN, tokens),
            tiles_done + section, row0 < R, tl.cdiv(R, TM) * tiles,
        )  # fmt: skip
    if current_amax is not None:
        atomic_amax(current_amax, load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN))
    if ROW is not None:
        if ROW.lanes > 0:
            P: tl.constexpr = ROW.lanes
            lanes = load_row_lanes(x, stride_r, stride_c, row0, col0, R, C, TM, TN, P, EVEN, tokens)
            index = tl.arange(0, TM * TN // P)
            r, group = row0 + index // (TN // P), col0 // P + index % (TN // P)
            lanes_side(lanes, r, group, R, row, first_program, TN // P, ROW, False, EVEN)
        else:
            values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN, tokens)
            tile_side(values, None, row0, col0, R, row, TM, TN, ROW, False, EVEN, current_amax,
                      first_program)  # fmt: skip
    if COL is not None:
        if COL.lanes > 0:
            Q: tl.constexpr = COL.lanes
            lanes = load_column_lanes(
                x, stride_r, stride_c, row0, col0, R, C, TM, TN, Q, EVEN, tokens
            )
            index = tl.arange(0, TM // Q * TN)
            r, group = col0 + index % TN, row0 // Q + index // TN
            lanes_side(lanes, r, group, C, col, first_program, TN, COL, True, EVEN)
        else:
            values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN, tokens)
            tile_side(tl.trans(values), None, col0, row0, C, col, TN, TM, COL, True, EVEN,
                      current_amax, first_program)  # fmt: skip
