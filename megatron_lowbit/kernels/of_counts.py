"""Numbers that follow from counts in device memory, which the host does not know.

They take the place of arrays with a number for each matrix. Tables that have them are made on the
device (``device_tables.py``).
"""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class OfCounts:
    """A number for each matrix, ``base + step * units``, int64 (count,).

    Args:
        counts: numbers of the matrices' rows, int64 (count,).
        total: their sum.
        unit: rows of a unit; a matrix has whole units, the last of them filled up.
        before: True to take the units of all earlier matrices, not the matrix's own.
        base, step: as above.
        empty: number for matrices without rows, or None.
    """

    counts: Tensor
    total: int
    unit: int
    before: bool = False
    base: int = 0
    step: int = 1
    empty: int | None = None

    __array_ufunc__ = None
    """NumPy's arrays leave operators to this class."""

    def __add__(self, number: int) -> "OfCounts":
        return self._with(self.base + number, self.step)

    def __mul__(self, factor: "int | np.ndarray") -> "OfCounts":
        """Multiply by a number, or by an array that has one number for all matrices.

        Raises:
            ValueError: the array has several numbers.
        """
        if isinstance(factor, np.ndarray):
            first = int(factor[0])
            if (factor != first).any():
                raise ValueError("counts on a device are multiplied by the same number for all")
            factor = first
        return self._with(self.base * factor, self.step * factor)

    __rmul__ = __mul__

    def _with(self, base: int, step: int) -> "OfCounts":
        """Return the same with another base and step, in a third of ``replace``'s time."""
        return OfCounts(self.counts, self.total, self.unit, self.before, base, step, self.empty)

    def __neg__(self) -> "OfCounts":
        return self * -1

    def __floordiv__(self, part: int) -> "OfCounts":
        """Divide numbers of rows with a minus sign, as ``cdiv`` does.

        Raises:
            ValueError: they are other numbers, or neither of the unit and the part divides the
                other.
        """
        unit = max(self.unit, part)
        if self.before or self.base or self.step != -self.unit or unit % self.unit or unit % part:
            raise ValueError(f"only numbers of rows are divided, by multiples: {self} by {part}")
        return replace(self, unit=unit, step=-(unit // part))

    @property
    def bound(self) -> int:
        """The largest sum that the numbers may have."""
        count = len(self.counts)
        return count * self.base + self.step * units_at_most(count, self.total, self.unit)


Numbers = np.ndarray | OfCounts
"""A number for each matrix."""


def units_at_most(count: int, total: int, unit: int) -> int:
    """Return the largest number of units that so many matrices with so many rows in all fill."""
    return (total + min(count, total) * (unit - 1)) // unit


def sum_of(numbers: Numbers) -> int:
    """Return the sum of numbers; the largest that it may be where the host does not know it."""
    return numbers.bound if isinstance(numbers, OfCounts) else int(numbers.sum())


def largest_of(numbers: Numbers) -> int:
    """Return the largest number; the largest that it may be where the host does not know it."""
    if isinstance(numbers, OfCounts):
        return numbers.base + numbers.step * units_at_most(1, numbers.total, numbers.unit)
    return int(numbers.max())


def sums_before(numbers: Numbers) -> Numbers:
    """Return the sum of the earlier matrices' numbers for each matrix."""
    if isinstance(numbers, OfCounts):
        return replace(numbers, before=True)
    return numbers.cumsum() - numbers


def smaller_of(left: Numbers, right: Numbers) -> Numbers:
    """Return the smaller of both numbers of each matrix, which are rows filled up to units."""
    if isinstance(left, OfCounts) and isinstance(right, OfCounts):
        return left if left.unit <= right.unit else right
    return np.minimum(left, right)


def unless_empty(numbers: Numbers, terms: Numbers, other: int) -> Numbers:
    """Return numbers, of which ``other`` is in the place of those without terms."""
    if isinstance(numbers, OfCounts):
        return replace(numbers, empty=other)
    return np.where(terms > 0, numbers, other)


def are_multiples(numbers: Numbers, divisor: int) -> bool:
    """Return True if all numbers are multiples; False where the host does not know it."""
    if isinstance(numbers, OfCounts):
        return numbers.base % divisor == numbers.step % divisor == 0
    return not (numbers % divisor).any()
