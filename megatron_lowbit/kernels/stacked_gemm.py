"""Products of parts of one FP8 matrix with parts of another, such as all experts' of a layer.

A fixed number of programs, one or two for each multiprocessor, computes all tiles: of n programs,
program p takes the tiles p, p + n, p + 2n and so on. It takes the steps of all its tiles in one
loop and loads operands of the next tile, whose descriptors never change, while it finishes the
current one. Of two programs on a multiprocessor, one multiplies while the other adds up. Each then
has half of the registers and of the shared memory: enough for the sums and the operands of a tile,
but for the products and results of only half of it, so that the tile is computed in two parts.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowbit.kernels.launcher import cdiv, multiprocessors, table_launcher
from megatron_lowbit.kernels.operand_group import Matrices
from megatron_lowbit.kernels.sections import FIRST_TILE, entry, pointer, section_of, table_of
from megatron_lowbit.kernels.split import RowSlices, SeparateMatrices

_NEIGHBOURS = tl.constexpr(8)
"""Row tiles computed one after another with the same columns, which stay in the cache."""


class Tile(NamedTuple):
    """Rows, columns and terms that a program computes at a time, and its launch."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


@triton.jit
def place_of_tile(tile, rows, columns, TM: tl.constexpr, TN: tl.constexpr):
    """Return the first row and column of a tile of a product (rows, columns)."""
    band = _NEIGHBOURS * tl.cdiv(columns, TN)
    first = tile // band * _NEIGHBOURS
    height = tl.minimum(tl.cdiv(rows, TM) - first, _NEIGHBOURS)
    return (first + tile % band % height) * TM, tile % band // height * TN


@triton.jit
def factor_of(table, section, PLACE: tl.constexpr, COUNT: tl.constexpr):
    """Return a factor in FP32; 1 without an address."""
    at = entry(table, section, PLACE, COUNT)
    return tl.load(at.to(tl.pointer_type(tl.float32)), mask=at != 0, other=1.0)


A, A_ROWS, A_COLUMNS, A_ROW, A_COLUMN, A_FACTOR = (tl.constexpr(i) for i in range(1, 7))
B, B_ROWS, B_COLUMNS, B_ROW, B_COLUMN, B_FACTOR = (tl.constexpr(i) for i in range(7, 13))
OUTS, OUT, OUT_ROW, ROWS, COLUMNS, STEPS = (tl.constexpr(i) for i in range(13, 19))
_FIELDS = tl.constexpr(19)
"""Rows of the table of products, after the first tiles; their number."""
_NOT_STACKED = tl.constexpr(2**31 - 1)
"""First row of a result that is no part of one matrix with the others."""
_ROWS, _COLUMNS, _TERMS = 128, 128, 128
"""Rows and columns of a tile, and terms of a step."""


class _Occupancy(NamedTuple):
    """Number of programs on a multiprocessor, of parts of a tile, and of warps of a program."""

    programs: int
    parts: int
    warps: int


_OCCUPANCY = {torch.bfloat16: _Occupancy(2, 2, 4), torch.float32: _Occupancy(1, 1, 8)}
"""By the result's dtype; found by trying on an H200 and an H100. Results in FP32, and what they are
added to, leave no room for two programs."""


def multiply_stacked(
    lhs: Matrices, rhs: Matrices, outs: RowSlices | SeparateMatrices, beta: bool
) -> None:
    """Write each ``lhs_i @ rhs_i.T``, times factors, to out_i, or add it to that.

    FP8 tensor cores add up 128 products, FP32 those sums.

    Args:
        lhs: (M_i, K_i) in FP8, parts of one matrix.
        rhs: (N_i, K_i) in FP8, parts of one matrix. Behind the terms of either are zeros, or its
            matrix ends.
        outs: (M_i, N_i), contiguous, all FP32 or all BF16.
        beta: True to add to what is there.
    """
    occupancy, device = _OCCUPANCY[outs.template.dtype], lhs.template.device
    terms = np.minimum(lhs.terms, rhs.terms)
    # A product without terms is a step outside of both matrices, where zeros are read.
    steps = np.maximum(cdiv(terms, _TERMS), 1)
    tiles = cdiv(lhs.rows, _ROWS) * cdiv(rhs.rows, _COLUMNS)
    fields = (
        *_operand(lhs, terms), *_operand(rhs, terms), *_results(outs), lhs.rows, rhs.rows, steps,
    )  # fmt: skip
    if (steps != steps[0]).any():
        # The longest tiles first: the rest fills up what they leave.
        order = np.argsort(-steps, kind="stable")
        steps, tiles = steps[order], tiles[order]
        fields = tuple(one[order] if isinstance(one, np.ndarray) else one for one in fields)
    programs = min(occupancy.programs * multiprocessors(device), max(1, int(tiles.sum())))
    steps_of_programs = _steps_per_program(np.repeat(steps, tiles), programs)
    table = table_of(tiles, fields, device, header=steps_of_programs)
    kinds = lhs.template, rhs.template, outs.template
    parts = occupancy.parts
    constants = _ROWS // parts, _COLUMNS, _TERMS, parts, beta, table.count
    options = ("num_warps", occupancy.warps), ("num_stages", 3)
    dtypes = [kind.dtype for kind in kinds]
    launch = table_launcher(stacked_gemm_kernel, constants, options, (1, 2, 3), *dtypes, device)
    launch((table.entries, *kinds), programs)


def _operand(side: Matrices, terms: np.ndarray) -> tuple[np.ndarray | int, ...]:
    """Return a side's entries of the table."""
    assert side.stack is not None
    rows, columns, first_rows, first_columns = side.stack
    first_columns = np.where(terms > 0, first_columns, columns)
    return side.template.data_ptr(), rows, columns, first_rows, first_columns, side.factors


def _results(outs: RowSlices | SeparateMatrices) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the lowest address of all results, then each address and its row from there on."""
    addresses, step = outs.addresses, outs.template.shape[1] * outs.template.itemsize
    first = int(addresses.min())
    rows, rest = np.divmod(addresses - first, step)
    return (
        first,
        addresses,
        np.where((rest == 0) & (rows < _NOT_STACKED.value), rows, _NOT_STACKED.value),
    )


def _steps_per_program(steps: np.ndarray, programs: int) -> np.ndarray:
    """Return the distance between a program's tiles, then each program's number of steps.

    ``steps`` are those of the tiles, the longest first. A tile longer than an even share of all
    steps is the only one of its program; the other programs take turns at the rest.
    """
    alone = int((steps * programs > steps.sum()).sum())
    rest, others = steps[alone:], programs - alone
    even = len(rest) // others * others
    turns = rest[:even].reshape(-1, others).sum(axis=0)
    turns[: len(rest) - even] += rest[even:]
    return np.concatenate([[others], steps[:alone], turns])


@triton.jit
def stacked_gemm_kernel(
    table, a_like, b_like, out_like,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, PARTS: tl.constexpr,
    ADDS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Compute a program's tiles of the products of a table in COUNT columns.

    A tile has one or two PARTS of (TM, TN). The table begins its list of tiles with what
    :func:`_steps_per_program` returns. ``a_like``, ``b_like`` and ``out_like`` tell dtypes.
    """
    tile, behind = tl.program_id(0), tl.num_programs(0) + 1
    apart = tl.load(table + _FIELDS * COUNT).to(tl.int32)
    steps = tl.load(table + _FIELDS * COUNT + 1 + tile).to(tl.int32)
    a = _whole(table, A, A_ROWS, A_COLUMNS, a_like, TM, TK, COUNT)
    b = _whole(table, B, B_ROWS, B_COLUMNS, b_like, TN, TK, COUNT)
    all_columns = entry(table, 0, COLUMNS, COUNT)
    # It stores whole tiles alone: how many rows it has does not matter.
    outs = tl.make_tensor_descriptor(
        pointer(table, 0, OUTS, COUNT, out_like),
        [_NOT_STACKED, all_columns.to(tl.int32)], [all_columns, 1], [TM, TN],
    )  # fmt: skip
    upper, lower = tl.zeros((TM, TN), tl.float32), tl.zeros((TM, TN), tl.float32)
    i, row0, col0, rows, k0, left = tile, tile, tile, tile, 0, 0
    a_row, a_column, b_row, b_column = tile, tile, tile, tile
    for _ in tl.range(0, steps):
        # Triton loads in advance only where all of this comes before the loads.
        k0, left = k0 + TK, left - 1
        if left < 0:
            i = section_of(table, tile, _FIELDS, COUNT, behind)
            within = tile - _number(table, i, FIRST_TILE, COUNT)
            tile += apart
            rows, columns = _number(table, i, ROWS, COUNT), _number(table, i, COLUMNS, COUNT)
            row0, col0 = place_of_tile(within, rows, columns, PARTS * TM, TN)
            a_row, a_column = _number(table, i, A_ROW, COUNT), _number(table, i, A_COLUMN, COUNT)
            b_row, b_column = _number(table, i, B_ROW, COUNT), _number(table, i, B_COLUMN, COUNT)
            k0, left = 0, _number(table, i, STEPS, COUNT) - 1
        rhs = b.load([b_row + col0, b_column + k0])
        lhs = a.load([a_row + row0, a_column + k0])
        upper = tl.dot(lhs, rhs.T, upper, max_num_imprecise_acc=TK)
        if PARTS == 2:
            lhs = a.load([a_row + row0 + TM, a_column + k0])
            lower = tl.dot(lhs, rhs.T, lower, max_num_imprecise_acc=TK)
        if left == 0:
            factor = factor_of(table, i, A_FACTOR, COUNT) * factor_of(table, i, B_FACTOR, COUNT)
            upper, lower = upper * factor, lower * factor
            first = _number(table, i, OUT_ROW, COUNT)
            if (first != _NOT_STACKED) & (row0 + PARTS * TM <= rows):
                _store(outs, first + row0, col0, upper, lower, out_like, PARTS, ADDS)
            else:
                columns = _number(table, i, COLUMNS, COUNT)
                start, step = pointer(table, i, OUT, COUNT, out_like), columns.to(tl.int64)
                out = tl.make_tensor_descriptor(start, [rows, columns], [step, 1], [TM, TN])
                _store(out, row0, col0, upper, lower, out_like, PARTS, ADDS)
            upper, lower = tl.zeros((TM, TN), tl.float32), tl.zeros((TM, TN), tl.float32)


@triton.jit
def _store(out, row, col, upper, lower, out_like, PARTS: tl.constexpr, ADDS: tl.constexpr):
    """Store the sums of a tile's PARTS, or add them to what is there."""
    if ADDS:
        upper += out.load([row, col]).to(tl.float32)
    out.store([row, col], upper.to(out_like.dtype.element_ty))
    if PARTS == 2:
        row += upper.shape[0]
        if ADDS:
            lower += out.load([row, col]).to(tl.float32)
        out.store([row, col], lower.to(out_like.dtype.element_ty))


@triton.jit
def _whole(
    table, PLACE: tl.constexpr, ROW_COUNT: tl.constexpr, STEP: tl.constexpr, template,
    TR: tl.constexpr, TK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Describe the matrix that all operands of a side are parts of."""
    start, step = pointer(table, 0, PLACE, COUNT, template), entry(table, 0, STEP, COUNT)
    shape = [_number(table, 0, ROW_COUNT, COUNT), step.to(tl.int32)]
    return tl.make_tensor_descriptor(start, shape, [step, 1], [TR, TK])


@triton.jit
def _number(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr):
    """Return an entry as int32."""
    return entry(table, section, FIELD, COUNT).to(tl.int32)
