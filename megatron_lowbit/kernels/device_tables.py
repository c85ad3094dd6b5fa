"""Tables of matrices (see ``sections.py``) whose numbers of rows stay on the device.

A kernel writes there what ``sections.table_of`` calculates on the host. How many tiles there are is
not known: memory and grids are as large as they may have to be, and the list of tiles has -1 behind
the last one, where kernels return.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv, table_launcher
from megatron_lowbit.kernels.of_counts import Numbers, OfCounts, sum_of
from megatron_lowbit.kernels.sections import Table, columns_for, table_of, uploaded

Entries = int | Sequence[int] | Numbers
"""Entry of all matrices of a table, or of each."""
MAX_MATRICES = 256
"""Matrices of a table at most: each program looks at all of them."""
_OWN, _BEFORE, _NUMBER, _ARRAY = (tl.constexpr(i) for i in range(4))
"""Quantities that a row is made from: units of a matrix; of those before it; the matrix's number;
what an array has for it."""
_TILES, _PROGRAMS, _OTHERS = 128, 16, 32
"""Entries of the list of tiles and of the header that a program writes; matrices that it compares
with all others at once."""


Field = tuple[int, int, int]
"""Formula of a table's row, as a constexpr: the quantity, its unit, and the entry of matrices
without rows, -1 for the same formula. Two numbers of the launch are its base and its step."""


def make_table(
    tiles: Numbers,
    fields: Sequence[Entries],
    device: torch.device,
    steps: int | None = None,
    programs: int = 0,
) -> Table:
    """Return the table that ``sections.table_of`` says, made on the device if counts are there."""
    counted = [field for field in (tiles, *fields) if isinstance(field, OfCounts)]
    if not counted:
        return table_of(tiles, fields, device, steps, programs)  # type: ignore[arg-type]
    counts, arrays = counted[0].counts, []
    formulas, numbers = [], []
    for field in (tiles, *fields):
        formula, *pair = _formula(field, arrays)
        formulas.append(formula)
        numbers += pair
    if arrays:
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        there = _arrays_there(b"".join(array.tobytes() for array in arrays), device, stream)
        rows = [row for row, formula in enumerate(formulas) if formula[0] == _ARRAY.value]
        for number, row in enumerate(rows):
            numbers[2 * row] = there.data_ptr() + number * arrays[0].nbytes
    matrices, all_tiles = len(counts), sum_of(tiles)
    count, header = columns_for(matrices), 0 if steps is None else 1 + programs
    words = len(formulas) * count + header + cdiv(all_tiles, 4)
    table = torch.empty(words, dtype=torch.int64, device=device)
    constants = tuple(formulas), steps, count, _TILES, _PROGRAMS, min(_OTHERS, count)
    launch = table_launcher(
        table_kernel, constants, (("num_warps", max(4, count // 16)),), (0, 2, 3, 4, 5), device
    )
    arguments = counts, table, tuple(numbers), matrices, all_tiles, programs
    launch(arguments, max(cdiv(all_tiles, _TILES), cdiv(programs, _PROGRAMS)))
    return Table(table, count, all_tiles)


def _formula(entries: Entries, arrays: list[np.ndarray]) -> tuple[Field, int, int]:
    """Return a row's formula, base and step; append what has no formula to ``arrays``."""
    if isinstance(entries, OfCounts):
        kind = _BEFORE if entries.before else _OWN
        empty = -1 if entries.empty is None else entries.empty
        return (kind.value, entries.unit, empty), entries.base, entries.step
    if isinstance(entries, int):
        return (_NUMBER.value, 1, -1), entries, 0
    array = np.asarray(entries, dtype=np.int64)
    steps = array[1:] - array[:-1]
    if not len(steps) or (steps == steps[0]).all():
        return (_NUMBER.value, 1, -1), int(array[0]), int(steps[0]) if len(steps) else 0
    arrays.append(array)
    return (_ARRAY.value, 1, -1), 0, array.itemsize


@lru_cache(maxsize=256)
def _arrays_there(content: bytes, device: torch.device, stream: int) -> Tensor:
    """Copy numbers to where a stream's kernels read them; a step has the same weights."""
    array = torch.empty(len(content) // 8, dtype=torch.int64, pin_memory=device.type == "cuda")
    array.numpy()[:] = np.frombuffer(content, dtype=np.int64)
    return uploaded(array, device)


@triton.jit(do_not_specialize=["matrices", "all_tiles", "programs"])
def table_kernel(
    counts, table, numbers, matrices, all_tiles, programs,
    FIELDS: tl.constexpr, STEPS: tl.constexpr, COUNT: tl.constexpr, TILES: tl.constexpr,
    PROGRAMS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Write the rows, the header and the list of tiles of a table in COUNT columns.

    The first of FIELDS are the numbers of tiles; each has two of the ``numbers``. Matrices come in
    the order of the row STEPS, largest first; None for their own order and no header. A program
    compares all matrices with OTHERS at once. It writes rows in turn with the other programs,
    PROGRAMS numbers of the header, and TILES of the list's ``all_tiles`` entries.
    """
    program, section = tl.program_id(0), tl.arange(0, COUNT)
    inside = section < matrices
    count = tl.load(counts + section, mask=inside, other=0)
    tiles = tl.where(inside, _entries(FIELDS, 0, numbers, section, count, inside), 0).to(tl.int32)
    list_of_tiles = table + len(FIELDS) * COUNT
    if STEPS is None:
        place, first = section, tl.cumsum(tiles, 0) - tiles
    else:
        steps = _steps(counts, numbers, matrices, section, FIELDS, STEPS)[1]
        place, first = tl.zeros((COUNT,), tl.int32), tl.zeros((COUNT,), tl.int32)
        for begin in range(0, COUNT, OTHERS):
            other = begin + tl.arange(0, OTHERS)
            their_tiles, theirs = _steps(counts, numbers, matrices, other, FIELDS, STEPS)
            longer = theirs[None, :] > steps[:, None]
            longer |= (theirs[None, :] == steps[:, None]) & (other[None, :] < section[:, None])
            place += tl.sum(longer.to(tl.int32), 1)
            first += tl.sum(tl.where(longer, their_tiles[None, :], 0), 1)
        _write_header(list_of_tiles, first, tiles, steps, programs, PROGRAMS)
        list_of_tiles += 1 + programs
    for row in tl.static_range(len(FIELDS)):
        if program == row % tl.num_programs(0):
            entries = first.to(tl.int64)
            if row > 0:
                entries = _entries(FIELDS, row, numbers, section, count, inside)
            tl.store(table + row * COUNT + place, entries, mask=inside)
    tile = program * TILES + tl.arange(0, TILES)
    owner = tl.sum(((first + tiles)[None, :] <= tile[:, None]).to(tl.int32), 1)
    owner = tl.where(tile < tl.sum(tiles, 0), owner, -1).to(tl.int16)
    tl.store(list_of_tiles.to(tl.pointer_type(tl.int16)) + tile, owner, mask=tile < all_tiles)


@triton.jit
def _entries(FIELDS: tl.constexpr, ROW: tl.constexpr, numbers, section, count, inside):
    """Return a row of a table, int64: what :class:`OfCounts` says, a progression, or an array."""
    KIND: tl.constexpr = FIELDS[ROW][0]
    UNIT: tl.constexpr = FIELDS[ROW][1]
    EMPTY: tl.constexpr = FIELDS[ROW][2]
    if KIND <= _BEFORE:
        number = (count + (UNIT - 1)) // UNIT
        if KIND == _BEFORE:
            number = tl.cumsum(number, 0) - number
    else:
        number = section.to(tl.int64)
    value = number * numbers[2 * ROW + 1] + numbers[2 * ROW]
    if KIND == _ARRAY:
        value = tl.load(value.to(tl.pointer_type(tl.int64)), mask=inside)
    if EMPTY >= 0:
        value = tl.where(count == 0, EMPTY, value)
    return value


@triton.jit
def _steps(counts, numbers, matrices, section, FIELDS: tl.constexpr, STEPS: tl.constexpr):
    """Return the numbers of tiles of matrices, and of a tile's steps; -1 behind the last matrix."""
    inside = section < matrices
    count = tl.load(counts + section, mask=inside, other=0)
    tiles = _entries(FIELDS, 0, numbers, section, count, inside)
    steps = _entries(FIELDS, STEPS, numbers, section, count, inside)
    return tl.where(inside, tiles, 0).to(tl.int32), tl.where(inside, steps, -1).to(tl.int32)


@triton.jit
def _write_header(header, first, tiles, steps, programs, PROGRAMS: tl.constexpr):
    """Write what ``sections.steps_per_program`` returns, for PROGRAMS of the programs."""
    long = tl.sum(tl.where(steps * programs > tl.sum(steps * tiles, 0), tiles, 0), 0)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    # A long tile is its program's only one: the next would be behind the last.
    apart = tl.where(program < long, 2**30, programs - long)[:, None]
    until = first[None, :] - program[:, None]
    skipped = tl.maximum((until + apart - 1) // apart, 0)
    taken = tl.maximum((until + tiles[None, :] + apart - 1) // apart, 0) - skipped
    taken = tl.sum(taken * steps[None, :], 1).to(tl.int64)
    tl.store(header + 1 + program, taken, mask=program < programs)
    if tl.program_id(0) == 0:
        tl.store(header, (programs - long).to(tl.int64))
