"""Matrices of one kind that a kernel takes together: a table of their places in device memory.

Programs count the tiles of all matrices, one matrix after another. A program finds its matrix in a
list of all tiles behind the table, and reads from the table what differs from matrix to matrix.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.split import Apart, Split, like

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

    ``count`` is the number of its columns, ``programs`` that of all tiles.
    """

    entries: Tensor
    count: int
    programs: int


def table_of(
    tiles: np.ndarray, fields: Sequence[np.ndarray | Sequence[int]], device: torch.device
) -> Table:
    """Return the table of matrices: their first tiles, and what else ``fields`` say.

    ``tiles`` are the numbers of their tiles. Columns are a power of two, so that few numbers of
    matrices are compiled: how many experts there are differs from rank to rank and model to model.
    """
    matrices, all_tiles = len(tiles), int(tiles.sum())
    count = triton.next_power_of_2(matrices)
    size = (1 + len(fields)) * count
    table = torch.zeros(size + all_tiles, dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = table.numpy()
    entries = numbers[:size].reshape(-1, count)[:, :matrices]
    entries[0] = np.cumsum(tiles) - tiles
    for row, field in enumerate(fields, 1):
        entries[row] = field
    numbers[size:] = np.repeat(np.arange(matrices), tiles)
    return Table(table.to(device, non_blocking=True), count, all_tiles)


def section_table(
    xs: Split | Apart, tile: tuple[int, int], fields: Sequence[np.ndarray | Sequence[int]]
) -> Table:
    """Return the table of matrices in tiles: addresses, rows, and more ``fields``.

    A program takes a tile of rows and columns; the table has their rows alone.
    """
    first = like(xs)
    table = table_of(cdiv(xs.rows, tile[0]), (xs.addresses, xs.rows, *fields), first.device)
    return table._replace(programs=table.programs * cdiv(first.shape[1], tile[1]))


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
