"""Matrices of one kind that a kernel takes together: a table of their places in device memory.

Programs count the row tiles of all matrices, one matrix after another. A program finds its matrix
by the first tiles, and reads from the table what differs from matrix to matrix.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

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


def table_of(tiles: Sequence[int], fields: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the table of matrices (int64): their first tiles, and what else ``fields`` say.

    ``tiles`` are the numbers of their tiles. Columns are a power of two, so that few numbers of
    matrices are compiled: how many experts have tokens differs from step to step. No tile belongs
    to the columns that are added.
    """
    first_tiles = [0, *accumulate(tiles)][:-1]
    added = [_NO_TILE] * (triton.next_power_of_2(len(tiles)) - len(tiles))
    rows = [[*row, *added] for row in (first_tiles, *fields)]
    # Of an array: torch goes through lists of lists number by number.
    numbers = array("q", chain.from_iterable(rows))
    table = torch.frombuffer(numbers, dtype=torch.int64).view(len(rows), -1)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def section_table(xs: Sequence[Tensor], tile_rows: int, fields: Sequence[Sequence[int]]) -> Tensor:
    """Return the table of matrices in row tiles: addresses, rows, and more ``fields``."""
    rows = [x.shape[0] for x in xs]
    tiles = [cdiv(count, tile_rows) for count in rows]
    return table_of(tiles, [[x.data_ptr() for x in xs], rows, *fields], xs[0].device)


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
