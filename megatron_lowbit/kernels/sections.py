"""Matrices of one kind that a kernel takes together: a table of their places in device memory.

Programs count the tiles of all matrices, one matrix after another. A program finds its matrix in a
list of all tiles behind the table, and reads from the table what differs from matrix to matrix.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv

FIRST_TILE, X, ROWS, ROW_SIGNS, COL_SIGNS = (tl.constexpr(i) for i in range(5))
ROW_KEY, ROW_CODES, ROW_SCALES = (tl.constexpr(i) for i in range(5, 8))
COL_KEY, COL_CODES, COL_SCALES, COL_COLUMNS = (tl.constexpr(i) for i in range(8, 12))
"""Rows of a table: an entry for each matrix."""
OF_THE_TABLE = 16
"""Argument in whose place a kernel reads the table: Triton compiles anew for other kinds."""
AMAX_FIELDS, QUANTIZE_FIELDS = tl.constexpr(5), tl.constexpr(12)
"""Numbers of rows in the tables of two kernels."""


class Table(NamedTuple):
    """Table of matrices: int64 rows of entries, then the matrix of each tile.

    ``count`` is the number of its columns.
    """

    entries: Tensor
    count: int


def table_of(tiles: Sequence[int], fields: Sequence[Sequence[int]], device: torch.device) -> Table:
    """Return the table of matrices: their first tiles, and what else ``fields`` say.

    ``tiles`` are the numbers of their tiles. Columns are a power of two, so that few numbers of
    matrices are compiled: how many experts there are differs from rank to rank and model to model.
    """
    first_tiles = [0, *accumulate(tiles)][:-1]
    count = triton.next_power_of_2(len(tiles))
    added = [0] * (count - len(tiles))
    matrices = (repeat(number, times) for number, times in enumerate(tiles))
    rows = (chain(row, added) for row in (first_tiles, *fields))
    # Of an array: torch goes through lists of lists number by number.
    numbers = array("q", chain.from_iterable(chain(rows, matrices)))
    table = torch.frombuffer(numbers, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return Table(table, count)


def section_table(xs: Sequence[Tensor], tile_rows: int, fields: Sequence[Sequence[int]]) -> Table:
    """Return the table of matrices in row tiles: addresses, rows, and more ``fields``."""
    rows = [x.shape[0] for x in xs]
    tiles = [cdiv(count, tile_rows) for count in rows]
    return table_of(tiles, [[x.data_ptr() for x in xs], rows, *fields], xs[0].device)


@triton.jit
def section_of(table, tile, FIELDS: tl.constexpr, COUNT: tl.constexpr):
    """Return the number of the matrix that has a tile, behind the FIELDS rows of the table."""
    return tl.load(table + FIELDS * COUNT + tile)


@triton.jit
def entry(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr):
    """Return an entry of a matrix, int64."""
    return tl.load(table + FIELD * COUNT + section)


@triton.jit
def pointer(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr, like):
    """Return an entry, a multiple of 16, as a pointer to what ``like`` points to.

    Where Triton does not know of the alignment, it reads and writes element by element.
    """
    address = tl.multiple_of(entry(table, section, FIELD, COUNT), 16)
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)
