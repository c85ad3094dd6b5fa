"""Products of parts of one FP8 matrix with parts of another, such as all experts' of a layer.

As many programs as the GPU has multiprocessors compute all tiles, each every so many of them. A
program takes the steps of its tiles in one loop: it loads the operands of the next tiles, whose
descriptors are always the same, while it finishes one.
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowbit.kernels.launcher import cdiv, table_launcher
from megatron_lowbit.kernels.operand_group import Matrices
from megatron_lowbit.kernels.product_tiles import Tile, factor_of, place_of_tile
from megatron_lowbit.kernels.sections import FIRST_TILE, entry, pointer, section_of, table_of
from megatron_lowbit.kernels.split import Apart, Split

A, A_ROWS, A_COLUMNS, A_ROW, A_COLUMN, A_FACTOR = (tl.constexpr(i) for i in range(1, 7))
B, B_ROWS, B_COLUMNS, B_ROW, B_COLUMN, B_FACTOR = (tl.constexpr(i) for i in range(7, 13))
OUT, ROWS, COLUMNS, STEPS = (tl.constexpr(i) for i in range(13, 17))
_FIELDS = tl.constexpr(17)
"""Rows of the table of products, after the first tiles; their number."""
_TILES = {torch.bfloat16: Tile(256, 128, 128, 8, 3), torch.float32: Tile(128, 128, 128, 8, 3)}
"""Tiles by the result's dtype: results lie beside the operands of ``stages`` steps."""


def multiply_stacked(lhs: Matrices, rhs: Matrices, outs: Split | Apart, adds: bool) -> None:
    """Write each ``lhs_i @ rhs_i.T``, times factors, to out_i, or add it to that.

    FP8 tensor cores add up 128 products, FP32 those sums.

    Args:
        lhs: (M_i, K_i) in FP8, parts of one matrix.
        rhs: (N_i, K_i) in FP8, parts of one matrix. Behind the terms of either are zeros, or its
            matrix ends.
        outs: (M_i, N_i), contiguous, all FP32 or all BF16.
        adds: True to add to what is there.
    """
    tile, device = _TILES[outs.like.dtype], lhs.like.device
    terms = np.minimum(lhs.terms, rhs.terms)
    tiles = cdiv(lhs.rows, tile.rows) * cdiv(rhs.rows, tile.columns)
    # A product without terms is a step outside of both matrices, where zeros are read.
    steps = np.maximum(cdiv(terms, tile.terms), 1)
    programs = min(_multiprocessors(device), max(1, int(tiles.sum())))
    fields = (
        *_fields(lhs, terms), *_fields(rhs, terms), outs.addresses, lhs.rows, rhs.rows, steps,
    )  # fmt: skip
    each = np.repeat(steps, tiles)
    rounds = np.pad(each, (0, -len(each) % programs)).reshape(-1, programs)
    table = table_of(tiles, fields, device, ahead=rounds.sum(axis=0))
    kinds = lhs.like, rhs.like, outs.like
    constants = tile.rows, tile.columns, tile.terms, adds, table.count
    options = ("num_warps", tile.warps), ("num_stages", tile.stages)
    dtypes = [kind.dtype for kind in kinds]
    launch = table_launcher(stacked_gemm_kernel, constants, options, (1, 2, 3), *dtypes, device)
    launch((table.entries, *kinds), programs)


def _fields(side: Matrices, terms: np.ndarray) -> tuple[np.ndarray | int, ...]:
    """Return a side's entries of the table."""
    assert side.stack is not None
    rows, columns, first_rows, first_columns = side.stack
    first_columns = np.where(terms > 0, first_columns, columns)
    return side.like.data_ptr(), rows, columns, first_rows, first_columns, side.factors


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; for Triton's interpreter a few."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def stacked_gemm_kernel(
    table, a_like, b_like, out_like,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, ADDS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Compute every so many tiles of the products of a table in COUNT columns.

    Before its list of tiles it has each program's number of steps. ``a_like``, ``b_like`` and
    ``out_like`` tell dtypes.
    """
    programs, tile = tl.num_programs(0), tl.program_id(0)
    steps = tl.load(table + _FIELDS * COUNT + tile).to(tl.int32)
    a = _whole(table, A, A_ROWS, A_COLUMNS, a_like, TM, TK, COUNT)
    b = _whole(table, B, B_ROWS, B_COLUMNS, b_like, TN, TK, COUNT)
    sums = tl.zeros((TM, TN), dtype=tl.float32)
    i, row0, col0, k0, left = tile, tile, tile, 0, 0
    a_row, a_column, b_row, b_column = tile, tile, tile, tile
    tile -= programs
    for _ in tl.range(0, steps):
        # Triton loads ahead only where all of this comes before the loads.
        k0, left = k0 + TK, left - 1
        if left < 0:
            tile += programs
            i = section_of(table, programs + tile, _FIELDS, COUNT).to(tl.int32)
            within = tile - _number(table, i, FIRST_TILE, COUNT)
            rows, columns = _number(table, i, ROWS, COUNT), _number(table, i, COLUMNS, COUNT)
            row0, col0 = place_of_tile(within, rows, columns, TM, TN)
            a_row, a_column = _number(table, i, A_ROW, COUNT), _number(table, i, A_COLUMN, COUNT)
            b_row, b_column = _number(table, i, B_ROW, COUNT), _number(table, i, B_COLUMN, COUNT)
            k0, left = 0, _number(table, i, STEPS, COUNT) - 1
        lhs = a.load([a_row + row0, a_column + k0])
        rhs = b.load([b_row + col0, b_column + k0])
        sums = tl.dot(lhs, rhs.T, sums, max_num_imprecise_acc=TK)
        if left == 0:
            sums *= factor_of(table, i, A_FACTOR, COUNT) * factor_of(table, i, B_FACTOR, COUNT)
            rows, columns = _number(table, i, ROWS, COUNT), _number(table, i, COLUMNS, COUNT)
            start, step = pointer(table, i, OUT, COUNT, out_like), columns.to(tl.int64)
            out = tl.make_tensor_descriptor(start, [rows, columns], [step, 1], [TM, TN])
            if ADDS:
                sums += out.load([row0, col0]).to(tl.float32)
            out.store([row0, col0], sums.to(out_like.dtype.element_ty))
            sums = tl.zeros((TM, TN), dtype=tl.float32)


@triton.jit
def _whole(
    table, PLACE: tl.constexpr, ROW_COUNT: tl.constexpr, STEP: tl.constexpr, like,
    TR: tl.constexpr, TK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Describe the matrix that all operands of a side are parts of."""
    start, step = pointer(table, 0, PLACE, COUNT, like), entry(table, 0, STEP, COUNT)
    shape = [_number(table, 0, ROW_COUNT, COUNT), step.to(tl.int32)]
    return tl.make_tensor_descriptor(start, shape, [step, 1], [TR, TK])


@triton.jit
def _number(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr):
    """Return an entry as int32."""
    return entry(table, section, FIELD, COUNT).to(tl.int32)
