"""Similar matrices that a kernel takes together: a table of their addresses in device memory.

Programs count the tiles of all matrices, one matrix after another. A program finds its matrix in a
list of all tiles behind the table, and reads from the table what differs from matrix to matrix.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv

FIRST_TILE, X, ROWS = (tl.constexpr(i) for i in range(3))
"""Rows of a table: an entry for each matrix. X is its address, or where rows are gathered the place
of its first row in their list."""
ROW_FIELDS, COL_FIELDS, QUANTIZE_FIELDS = (tl.constexpr(i) for i in (3, 8, 13))
"""First rows of both sides in the table of matrices to quantize; the number of its rows. The amaxes
are taken by the same table."""
SIGNS, KEY, CODES, SCALES, COLUMNS = (tl.constexpr(i) for i in range(5))
"""Rows of a side, from its first on."""
OF_THE_TABLE = 16
"""Argument in whose place a kernel reads the table: Triton compiles again for other types."""
_MAX_MATRICES = np.iinfo(np.int16).max
"""Matrices of a table at most."""


class Table(NamedTuple):
    """Table of matrices: int64 rows of entries, then the matrix of each tile in int16.

    ``count`` is the number of its columns, ``programs`` the number of all tiles.
    """

    entries: Tensor
    count: int
    programs: int


def table_of(
    tiles: np.ndarray,
    fields: Sequence[np.ndarray | Sequence[int] | int],
    device: torch.device,
    steps: int | None = None,
    programs: int = 0,
) -> Table:
    """Return the table of matrices: their first tiles, and what else ``fields`` say.

    Columns are a power of two, so that few numbers of matrices are compiled: how many experts there
    are differs from rank to rank and model to model.

    Args:
        tiles: the matrices' numbers of tiles.
        fields: the table's other rows.
        device: where the table is.
        steps: the number of the row that has the steps of a tile: matrices with more of them come
            first, and what :func:`steps_per_program` returns comes before the list of tiles. None
            for neither.
        programs: those that share the tiles, at most as many.

    Raises:
        ValueError: more matrices than int16 numbers.
    """
    header: Sequence[int] | np.ndarray = ()
    if steps is not None:
        lengths = np.asarray(fields[steps - 1])
        if (lengths != lengths[0]).any():
            # The longest tiles first: the rest fills up what they leave.
            order = np.argsort(-lengths, kind="stable")
            lengths, tiles = lengths[order], tiles[order]
            fields = [f[order] if isinstance(f, np.ndarray) else f for f in fields]
        header = steps_per_program(np.repeat(lengths, tiles), programs)
    ends = tiles.cumsum()
    matrices, all_tiles = len(tiles), int(ends[-1])
    count = columns_for(matrices)
    size = (1 + len(fields)) * count
    begin = size + len(header)
    words = begin + cdiv(all_tiles, 4)
    table = torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = table.numpy()
    entries = numbers[:size].reshape(-1, count)[:, :matrices]
    entries[0] = ends - tiles
    for row, field in enumerate(fields, 1):
        entries[row] = field
    numbers[size:begin] = header
    numbers[begin:].view(np.int16)[:all_tiles] = np.repeat(_numbers(matrices), tiles)
    return Table(uploaded(table, device), count, all_tiles)


def steps_per_program(steps: np.ndarray, programs: int) -> np.ndarray:
    """Return the distance between a program's tiles, then each program's number of steps.

    ``steps`` are the tiles' numbers of steps, largest first. A tile longer than an even share of
    all steps is the only one of its program; the other programs take turns at the rest.
    """
    long = int((steps * programs > steps.sum()).sum())
    rest, others = steps[long:], programs - long
    even = len(rest) // others * others
    turns = rest[:even].reshape(-1, others).sum(axis=0)
    turns[: len(rest) - even] += rest[even:]
    return np.concatenate([[others], steps[:long], turns])


def uploaded(table: Tensor, device: torch.device) -> Tensor:
    """Copy a pinned table to the device, on a GPU while its earlier kernels run.

    Between two kernels of one stream a copy, and the changes to it and back, take 10 us.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return table.to(device, non_blocking=True)
    stream, uploads = torch.cuda.current_stream(device), _upload_stream(device)
    with torch.cuda.stream(uploads):
        there = table.to(device, non_blocking=True)
    stream.wait_stream(uploads)
    there.record_stream(stream)
    return there


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def columns_for(matrices: int) -> int:
    """Return the number of columns of a table of so many matrices."""
    return int(triton.next_power_of_2(matrices))


@lru_cache(maxsize=1024)
def _numbers(count: int) -> np.ndarray:
    if count > _MAX_MATRICES:
        raise ValueError(f"one launch takes up to {_MAX_MATRICES} matrices, not {count}")
    return np.arange(count, dtype=np.int16)


@triton.jit
def section_of(table, tile, FIELDS: tl.constexpr, COUNT: tl.constexpr, header=0):
    """Return the number of the matrix that has a tile, int32; -1 behind the last tile.

    It is read behind the FIELDS rows of the table and what comes ``header`` of the list of tiles.
    """
    tiles = (table + FIELDS * COUNT + header).to(tl.pointer_type(tl.int16))
    return tl.load(tiles + tile).to(tl.int32)


@triton.jit
def entry(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr):
    """Return an entry of a matrix, int64."""
    return tl.load(table + FIELD * COUNT + section)


@triton.jit
def pointer(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr, template):
    """Return an entry, a multiple of 16, as a pointer to the type that ``template`` points to.

    Where Triton does not know of the alignment, it reads and writes element by element.
    """
    address = tl.multiple_of(entry(table, section, FIELD, COUNT), 16)
    return tl.multiple_of(address.to(tl.pointer_type(template.dtype.element_ty)), 16)
