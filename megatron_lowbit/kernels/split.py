"""Matrices of one kind: parts of one tensor, such as the tokens of a layer's experts, or apart.

What kernels need of many matrices is calculated here for all at once: asking each of a hundred
tensors for its address takes the CPU longer than the GPU multiplies them.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from torch import Tensor


class Split(Sequence[Tensor]):
    """The parts of a matrix (T, K), as a sequence of views.

    Args:
        whole: the matrix.
        rows: number of rows of each part, of sum T.
    """

    def __init__(self, whole: Tensor, rows: Sequence[int]) -> None:
        self.whole, self.rows = whole, np.asarray(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # of an int: a sequence's own
        """Return the part of that number."""
        first = int(self.rows[:number].sum())
        return self.whole[first : first + int(self.rows[number])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.whole.split(self.rows.tolist()))

    @cached_property
    def addresses(self) -> np.ndarray:
        """The address of each part, int64, also of one without rows."""
        row_bytes = self.whole.stride(0) * self.whole.element_size()
        return self.whole.data_ptr() + (np.cumsum(self.rows) - self.rows) * row_bytes


class Apart(Sequence[Tensor]):
    """Matrices in memory of their own, such as experts' weights, that are looked at once."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = matrices

    def __len__(self) -> int:
        return len(self.matrices)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # of an int: a sequence's own
        """Return the matrix of that number."""
        return self.matrices[number]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.matrices)

    @cached_property
    def rows(self) -> np.ndarray:
        """The number of rows of each, int64."""
        return np.array([x.shape[0] for x in self.matrices], dtype=np.int64)

    @cached_property
    def addresses(self) -> np.ndarray:
        """The address of each, int64."""
        return np.array([x.data_ptr() for x in self.matrices], dtype=np.int64)


def looked_at(matrices: Sequence[Tensor]) -> Split | Apart:
    """Return matrices whose rows and addresses are known."""
    return matrices if isinstance(matrices, Split | Apart) else Apart(matrices)


def like(matrices: Sequence[Tensor]) -> Tensor:
    """Return a tensor of the matrices' dtype, device, columns and strides."""
    return matrices.whole if isinstance(matrices, Split) else matrices[0]


def columns_of(matrices: Sequence[Tensor]) -> np.ndarray:
    """Return the number of columns of each matrix, int64."""
    return np.array([x.shape[1] for x in matrices], dtype=np.int64)


def layouts_in_memory(matrices: Sequence[Tensor]) -> set[tuple]:
    """Return what matrices have of columns, strides, dtypes and devices: one, if they are alike."""
    alike = [matrices.whole] if isinstance(matrices, Split) else matrices
    return {(x.shape[1], x.stride(), x.dtype, x.device) for x in alike}
