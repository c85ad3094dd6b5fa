"""Similar matrices: parts of one tensor, such as the tokens of a layer's experts, or separate.

What kernels need of many matrices is calculated here for all at once, and what follows from their
numbers of rows only once: asking each of a hundred tensors for its address takes the CPU longer
than the GPU multiplies them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron_lowbit.kernels.of_counts import Numbers, OfCounts, are_multiples


class Units(NamedTuple):
    """Units of several rows: the number in each matrix, before it, and in all."""

    numbers: Numbers
    before: Numbers
    total: int


class Rows:
    """Numbers of rows of matrices, int64 (count,).

    ``offsets`` keeps where operands of a layout lie in memory.
    """

    def __init__(self, numbers: Sequence[int] | np.ndarray) -> None:
        self.on_host = np.asarray(numbers, dtype=np.int64)
        self._units: dict[int, Units] = {}
        self.offsets: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.on_host)

    @property
    def numbers(self) -> Numbers:
        """The numbers of rows."""
        return self.on_host

    @property
    def known(self) -> "Rows":
        """The same numbers, which the host knows."""
        return self

    def in_units(self, unit: int) -> Units:
        """Return the matrices in units of so many rows."""
        if unit not in self._units:
            self._units[unit] = self._in_units(unit)
        return self._units[unit]

    def _in_units(self, unit: int) -> Units:
        numbers = (self.on_host + (unit - 1)) // unit
        ends = numbers.cumsum()
        return Units(numbers, ends - numbers, int(ends[-1]))


class DeviceRows(Rows):
    """Numbers of rows that stay on the device; totals of units are the largest possible ones.

    Args:
        counts: the numbers, int64 (count,).
        total: their sum.
    """

    def __init__(self, counts: Tensor, total: int) -> None:
        self.counts, self.total = counts, total
        self._units, self.offsets = {}, {}

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def known(self) -> Rows:  # type: ignore[override]
        """The same numbers on the host, which waits for them: for what has no kernel."""
        return Rows(self.counts.tolist())

    @property
    def on_host(self) -> np.ndarray:  # type: ignore[override]
        """The numbers, for which the host waits."""
        return self.known.on_host

    @property
    def numbers(self) -> OfCounts:
        return OfCounts(self.counts, self.total, 1)

    def _in_units(self, unit: int) -> Units:
        numbers = OfCounts(self.counts, self.total, unit)
        return Units(numbers, replace(numbers, before=True), numbers.bound)


@lru_cache(maxsize=1024)
def rows_of(numbers: tuple[int, ...]) -> Rows:
    """Return the one object of these numbers of rows."""
    return Rows(numbers)


class SeparateMatrices(Sequence[Tensor]):
    """Matrices, each with its own address, such as experts' weights, that are looked at once.

    ``template`` has the dtype, device, columns and strides of all. With ``tokens``, int32, they
    have the rows of the template that these name, and addresses are places in their list.
    """

    tokens: Tensor | None = None

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices, self.template = matrices, matrices[0]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # of an int: a sequence's own
        """Return the matrix of that number."""
        return self.matrices[number]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.matrices)

    @cached_property
    def rows(self) -> Rows:
        """The number of rows of each."""
        return rows_of(tuple([x.shape[0] for x in self.matrices]))

    @cached_property
    def addresses(self) -> Numbers:
        """The address of each, int64, also of one without rows."""
        return np.array([x.data_ptr() for x in self.matrices], dtype=np.int64)

    @property
    def aligned(self) -> bool:
        """True if each begins at a multiple of 16 bytes, whatever their rows."""
        return are_multiples(self.addresses, 16)

    @cached_property
    def alike(self) -> bool:
        """True if they have the same columns, strides, dtype and device."""
        first, *others = self.matrices
        layout = first.shape[1], first.stride(), first.dtype, first.device
        return all((x.shape[1], x.stride(), x.dtype, x.device) == layout for x in others)


class RowSlices(SeparateMatrices):
    """The parts of a matrix (T, K), as a sequence of views.

    Args:
        matrix: the matrix; or with ``tokens`` one (T0, K), whose rows are gathered.
        rows: number of rows of each part, of sum T.
        tokens: (T,), int32, the matrix's row of each row; None for the rows in their order.
    """

    alike = True

    def __init__(self, matrix: Tensor, rows: Rows, tokens: Tensor | None = None) -> None:
        self.matrix = self.template = matrix
        self.rows, self.tokens = rows, tokens

    @cached_property
    def matrices(self) -> Sequence[Tensor]:  # type: ignore[override]
        """The parts; copies of gathered rows, for what has no kernel."""
        matrix = self.matrix if self.tokens is None else self.matrix[self.tokens]
        return matrix.split(self.rows.on_host.tolist())

    @cached_property
    def addresses(self) -> Numbers:
        """The address of each part, int64, also of one without rows; or its place in tokens."""
        before = self.rows.in_units(1).before
        if self.tokens is not None:
            return before
        return before * self._row_bytes + self.matrix.data_ptr()

    @property
    def aligned(self) -> bool:
        """True if each row begins at a multiple of 16 bytes."""
        return self.matrix.data_ptr() % 16 == 0 and self._row_bytes % 16 == 0

    @property
    def _row_bytes(self) -> int:
        return self.matrix.stride(0) * self.matrix.element_size()


@dataclass(frozen=True)
class ColumnSlices(Sequence[Tensor]):
    """The transposes (K, rows) of the parts of a matrix, as a sequence of views."""

    of: RowSlices

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # of an int: a sequence's own
        """Return the transpose of that number."""
        return self.of[number].t()


def transposes_of(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the transposes of matrices, as views."""
    if isinstance(matrices, RowSlices):
        return ColumnSlices(matrices)
    return [x.t() for x in matrices]


def as_matrix_list(matrices: Sequence[Tensor]) -> SeparateMatrices:
    """Return matrices whose rows and addresses are known."""
    return matrices if isinstance(matrices, SeparateMatrices) else SeparateMatrices(matrices)
