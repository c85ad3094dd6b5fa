"""Matrices whose numbers of rows stay on the device: the tables and results of known numbers."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from megatron_lowbit.kernels import of_counts
from megatron_lowbit.kernels.device_tables import Entries, make_table
from megatron_lowbit.kernels.launch_sections import quantize_sections, takes_sections
from megatron_lowbit.kernels.launcher import _type_key, cdiv
from megatron_lowbit.kernels.operand_group import OperandGroup
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sections import Table, columns_for, table_of
from megatron_lowbit.kernels.split import DeviceRows, Rows, RowSlices, SeparateMatrices
from megatron_lowbit.numerics import Requests
from tests.kernels.test_quantize import DEVICE, values
from tests.kernels.test_sections import CASES, check_same, request_of
from tests.marks import by_turns, others_slow


def draws_of_counts() -> Iterator[list[int]]:
    """Yield numbers of rows: none, all of one matrix, and random ones."""
    yield from ([5], [128], [0, 0, 40], [40, 0, 0], [16, 16, 32], [0] * 127 + [300])
    generator = np.random.default_rng(3)
    for count in (1, 2, 3, 3, 8, 8, 60, 128, 128, 128, 200, 256):
        counts = generator.geometric(1 / 40, count) * (generator.random(count) < 0.7)
        yield [*map(int, counts)]
    yield [1] * 128
    yield [0, 129, 127, 1]


DEVICE_OF_COUNTS = torch.zeros((), device=DEVICE).device
"""With its index, as tensors give it."""


def on_device(counts: list[int]) -> DeviceRows:
    return DeviceRows(torch.tensor(counts, device=DEVICE), sum(counts))


def fields_of(rows: Rows) -> list[Entries]:
    """Return rows of a table, of each kind."""
    count = len(rows)
    others = np.random.default_rng(count).integers(-(2**63), 2**63, count)
    units = rows.in_units(32)
    columns = units.before * 32
    empty = of_counts.unless_empty(columns, rows.numbers, 2**30)
    filled = of_counts.smaller_of(units.numbers * 32, rows.in_units(16).numbers * 16)
    before = of_counts.sums_before(units.numbers * 32) * 3
    return [
        rows.in_units(1).before * 48 + 2**44, rows.numbers, columns, empty, filled, before,
        2**63 - 1, 4 * np.arange(count) + 2**44, np.full(count, 7), [*map(int, others)],
        cdiv(filled, 64) * np.full(count, 5),
    ]  # fmt: skip


def parts_of(table: Table, fields: int, count: int, header: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the rows, the header and the list of tiles of a table."""
    size = fields * columns_for(count)
    rows = table.entries[:size].view(fields, -1)[:, :count]
    tiles = table.entries[size + header :].view(torch.int16)[: table.programs]
    return rows, table.entries[size : size + header], tiles


def check_table(made: Table, expected: Table, fields: int, count: int, header: int = 0) -> None:
    """Compare two tables; the first one's list may go on with -1."""
    assert made.count == expected.count and made.programs >= expected.programs
    pair = [parts_of(table, fields, count, header) for table in (made, expected)]
    for one, other in zip(*(parts[:2] for parts in pair), strict=True):
        assert torch.equal(one, other)
    tiles, known = pair[0][2], pair[1][2]
    assert torch.equal(tiles[: len(known)], known) and (tiles[len(known) :] == -1).all()


@pytest.mark.parametrize("counts", [*draws_of_counts()], ids=lambda counts: f"{len(counts)}")
def test_the_table_of_known_numbers(counts):
    tables = []
    for rows in (on_device(counts), Rows(counts)):
        fields, device = fields_of(rows), DEVICE_OF_COUNTS
        make: Callable = make_table if isinstance(rows, DeviceRows) else table_of
        tables.append(make(rows.in_units(64).numbers * 3, fields, device))
    check_table(*tables, 1 + len(fields), len(counts))


@pytest.mark.parametrize("along_rows", [False, True])
@pytest.mark.parametrize(("counts", "programs"), by_turns([*draws_of_counts()], [1, 5, 40]))
def test_programs_share_the_tiles_of_known_numbers(counts, along_rows, programs):
    """Tiles have steps along counted rows, the longest first, or there are more of them."""
    tables, number = [], len(counts)
    for rows in (on_device(counts), Rows(counts)):
        tiles = rows.in_units(128).numbers * 3
        steps = np.full(number, 9)
        if along_rows:
            tiles, steps = np.full(number, 4), of_counts.unless_empty(
                cdiv(rows.numbers, 16), rows.numbers, 1
            )  # fmt: skip
        fields = [rows.numbers, steps, 5, np.arange(number) ** 2]
        make: Callable = make_table if isinstance(rows, DeviceRows) else table_of
        tables.append(make(tiles, fields, DEVICE_OF_COUNTS, 2, programs))
    check_table(*tables, 1 + len(fields), number, 1 + programs)


def test_numbers_that_counts_do_not_give():
    rows = on_device([3, 4])
    with pytest.raises(ValueError, match="the same number for all"):
        rows.numbers * np.array([1, 2])
    for numbers, part in ((rows.in_units(32).numbers, 16), (rows.numbers + 1, 16),
                          (rows.in_units(48).numbers * 48, 32)):  # fmt: skip
        with pytest.raises(ValueError, match="only numbers of rows"):
            cdiv(numbers, part)


def test_launches_of_other_tuples_are_compiled_anew():
    """Triton specializes numbers of a tuple for multiples of 16 and for 1, as arguments."""
    kinds = [(2, 3), (16, 3), (1, 3), (2, 2**40), (2, 2**40 + 1)]
    assert len({_type_key(kind) for kind in kinds}) == len(kinds)
    assert _type_key((32, 5)) == _type_key((16, 3))


FORMS_OF = {case: forms for case, (*_, forms) in CASES.items()} | {"mxfp8": "FOLDED FOLDED"}
ON_DEVICE = ["fp8 tiles", "fp8 tensor", "mxfp8", "nvfp4", "ms-eden"]


Operands = tuple[OperandGroup, OperandGroup]
QUICK = ["fp8 tiles", "nvfp4"]
COUNTS = [[24, 0, 16], [0, 136, 0, 7]]


def operands_of(case: str, xs: SeparateMatrices) -> Operands:
    forms, keys = FORMS_OF[case].split(), range(7, 7 + len(xs))
    rows, cols = (
        Requests(request_of(case, 0, left=left), keys, [key + 100 for key in keys])
        for left in (True, False)
    )
    assert takes_sections(xs, rows, cols)
    return quantize_sections(xs, rows, cols, tuple(Form[form] for form in forms))


def check_operands(made: Operands, known: Operands, counts: list[int]) -> None:
    for one, other in zip(made, known, strict=True):
        for number in np.flatnonzero(counts):
            check_same(one[number], other[number], one.layout.stacks_columns)


@pytest.mark.usefixtures("not_a_number_in_free_memory")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("case", others_slow(ON_DEVICE, QUICK[:1]))
def test_the_operands_of_known_numbers(case, counts):
    x = values(sum(counts), 48, torch.bfloat16).to(DEVICE)
    made, known = (operands_of(case, RowSlices(x, r)) for r in (on_device(counts), Rows(counts)))
    check_operands(made, known, counts)


@pytest.mark.usefixtures("not_a_number_in_free_memory")
@pytest.mark.parametrize("counts", others_slow(COUNTS, COUNTS[:1]), ids=str)
@pytest.mark.parametrize("case", others_slow(CASES, QUICK[1:]))
def test_the_operands_of_gathered_rows(case, counts):
    """Rows of a matrix by their numbers, some of them in several matrices and some in none."""
    x = values(60, 48, torch.bfloat16).to(DEVICE)
    draws = torch.Generator().manual_seed(3)
    tokens = torch.randint(60, (sum(counts),), generator=draws, dtype=torch.int32).to(DEVICE)
    known = operands_of(case, RowSlices(x[tokens], Rows(counts)))
    for rows in (on_device(counts), Rows(counts)):
        gathered = RowSlices(x, rows, tokens)
        check_operands(operands_of(case, gathered), known, counts)
        for part, expected in zip(gathered, x[tokens].split(counts), strict=True):
            assert torch.equal(part, expected)
