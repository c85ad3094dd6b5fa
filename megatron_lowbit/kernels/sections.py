"""Matrices of one kind that a kernel takes together: a table of their places in device memory.

Programs count the row tiles of all matrices, one matrix after another. A program finds its matrix
by the first tiles, and reads from the table what differs from matrix to matrix.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv

FIRST_TILE, X, ROWS, ROW_SIGNS, COL_SIGNS = (tl.constexpr(i) for i in range(5))
ROW_KEY, ROW_CODES, ROW_SCALES = (tl.constexpr(i) for i in range(5, 8))
COL_KEY, COL_CODES, COL_SCALES, COL_COLUMNS = (tl.constexpr(i) for i in range(8, 12))
"""Rows of a table: an entry for each matrix."""

_NO_TILE = 1 << 62


def section_table(xs: Sequence[Tensor], tile_rows: int, fields: Sequence[Sequence[int]]) -> Tensor:
    """Return the table of matrices (int64): first tiles, addresses, rows, and more ``fields``.

    Its columns are a power of two, so that few numbers of matrices are compiled: how many experts
    have tokens differs from step to step. No tile belongs to the columns that are added.
    """
    first_tiles, tiles = [], 0
    for x in xs:
        first_tiles.append(tiles)
        tiles += cdiv(len(x), tile_rows)
    rows = [first_tiles, [x.data_ptr() for x in xs], [len(x) for x in xs], *fields]
    added = triton.next_power_of_2(len(xs)) - len(xs)
    table = torch.tensor([[*row, *[_NO_TILE] * added] for row in rows], dtype=torch.int64)
    device = xs[0].device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@triton.jit
def section_of(table, tile, COUNT: tl.constexpr):
    """Return the number of the matrix that has the ``tile``-th row tile, of a COUNT of columns."""
    first_tiles = tl.load(table + tl.arange(0, COUNT))
    return tl.sum((first_tiles <= tile).to(tl.int32), 0) - 1


@triton.jit
def entry(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr):
    """Return an entry of a matrix, int64."""
    return tl.load(table + FIELD * COUNT + section)


@triton.jit
def pointer(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr, like):
    """Return an entry as a pointer to what ``like`` points to."""
    return entry(table, section, FIELD, COUNT).to(tl.pointer_type(like.dtype.element_ty))
