"""Operands of one kind in common memory, such as all experts'; and as matrices of a GEMM."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv, table_launcher
from megatron_lowbit.kernels.operands import (
    DECODED_TILE,
    Transposed,
    Values,
    decode_kernel,
    decoding_programs,
    elements_of,
    has_tensor_scale,
)
from megatron_lowbit.kernels.sections import OF_THE_TABLE, table_of
from megatron_lowbit.kernels.sides import Layout, Numbers, memory_of, one_of, output_of
from megatron_lowbit.kernels.split import columns_of, like, looked_at
from megatron_lowbit.numerics import QuantizedTensor

_ALIGNMENT = 16
"""Elements at whose multiples an operand begins in the memory of all."""


@dataclass(frozen=True)
class OperandGroup:
    """Operands of one kind in common memory, as a sequence.

    ``codes`` and ``scales`` (None where nothing is stored) hold one operand after another, which
    begin at ``places``, in elements; ``tensor_scales`` is FP32 (count,). ``layout`` is that of all.
    """

    codes: Tensor
    scales: Tensor | None
    tensor_scales: Tensor
    layout: Layout
    places: tuple[np.ndarray, np.ndarray]

    def __len__(self) -> int:
        return len(self.tensor_scales)

    def __getitem__(self, number: int) -> QuantizedTensor | Values:
        layout = one_of(self.layout, number)
        memories = zip((self.codes, self.scales), memory_of(layout), self.places, strict=True)
        codes, scales = (
            None if memory is None else _part(whole, int(places[number]), memory.shape)
            for whole, memory, places in memories
        )
        return output_of(layout)(codes, scales, self.tensor_scales[number]).made

    def __iter__(self) -> Iterator[QuantizedTensor | Values]:
        return (self[number] for number in range(len(self)))

    def transpose(self) -> "OperandGroup":
        """Return the transposes of exact numbers, in the same memory."""
        rows, columns = self.layout.shape
        layout = self.layout._replace(
            shape=(columns, rows), columns=rows, transposed=not self.layout.transposed
        )
        return replace(self, layout=layout)


@dataclass(frozen=True)
class TransposedGroup:
    """The transposes of operands in square blocks, which they share their codes with."""

    of: OperandGroup

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, number: int) -> Transposed:
        return Transposed(self.of[number])

    def __iter__(self) -> Iterator[Transposed]:
        return (self[number] for number in range(len(self)))


def one_to_look_at(operands: Sequence[Any]) -> Any:
    """Return an operand of the kind that all are; of codes in a group their format."""
    group = operands.of if isinstance(operands, TransposedGroup) else operands
    if isinstance(group, OperandGroup) and not group.layout.side.values:
        return group.layout.stored
    return operands[0]


def allocate(layout: Layout, count: int, device: torch.device) -> OperandGroup:
    """Allocate so many operands."""
    ends = _ends(layout, count)
    codes, scales = (
        None if memory is None else torch.empty(int(end[-1]), dtype=memory.dtype, device=device)
        for memory, end in zip(memory_of(layout), ends, strict=True)
    )
    # No program writes that of an empty matrix.
    tensor_scales = torch.zeros(count, dtype=torch.float32, device=device)
    return OperandGroup(codes, scales, tensor_scales, layout, (ends[0][:-1], ends[1][:-1]))


def _ends(layout: Layout, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where codes and scales begin, in elements, and where the last of them end."""
    ends = np.zeros((2, count + 1), dtype=np.int64)
    for row, shape in zip(ends, (layout.code_shape, layout.scale_shape), strict=True):
        row[1:] = cdiv(math.prod(shape), _ALIGNMENT) * _ALIGNMENT
    codes, scales = ends.cumsum(axis=1)
    return codes, scales


def _each(number: Numbers, count: int) -> np.ndarray:
    """Return a number for each of so many matrices."""
    return number if isinstance(number, np.ndarray) else np.full(count, number, dtype=np.int64)


def _part(whole: Tensor, place: int, shape: tuple[int, ...]) -> Tensor:
    return whole[place : place + math.prod(shape)].view(shape)


class Matrices(NamedTuple):
    """Matrices (R, K) of one dtype in the memory of a device, by their addresses.

    ``like`` is a tensor of their dtype, which keeps their memory. ``terms`` are their K. ``steps``
    lead from row to row in elements, or from column to column unless ``by_rows``. ``factors`` are
    the addresses of FP32 scalars, 0 for 1; ``scales`` those of FP8 tiles' FP32 scales, or None:
    of 1x128 tiles with rows fastest, of 128x128 tiles with columns fastest.
    """

    like: Tensor
    addresses: np.ndarray
    rows: np.ndarray
    terms: np.ndarray
    steps: np.ndarray
    by_rows: bool
    factors: np.ndarray
    scales: np.ndarray | None

    def transpose(self) -> "Matrices":
        """Return the transposes, in the same memory."""
        return self._replace(rows=self.terms, terms=self.rows, by_rows=not self.by_rows)

    @property
    def aligned(self) -> bool:
        """Return True if addresses and steps are multiples of 16 bytes."""
        return (
            not (self.addresses % 16).any()
            and not (self.steps * self.like.element_size() % 16).any()
        )


def matrices_of(operands: OperandGroup | Sequence[Tensor]) -> Matrices:
    """Return operands as matrices: FP8 codes, exact BF16 numbers, or BF16 tensors themselves."""
    count = len(operands)
    if not isinstance(operands, OperandGroup):
        first, known = like(operands), looked_at(operands)
        by_rows = first.stride(1) == 1
        return Matrices(
            first,
            known.addresses,
            known.rows,
            _each(first.shape[1], count) if by_rows else columns_of(operands),
            _each(first.stride(0 if by_rows else 1), count),
            by_rows,
            _each(0, count),
            None,
        )
    layout, codes, scales = operands.layout, operands.codes, operands.scales
    side, format = layout.side, layout.stored
    dtype = torch.bfloat16 if side.values else format.element.dtype
    codes_at, scales_at = operands.places
    by_rows = not (side.values and layout.transposed)
    rows, terms = (_each(size, count) for size in layout.shape)
    factors = _each(0, count)
    if not side.values or has_tensor_scale(format):
        factors = _factors(operands)
    scaled = scales is not None and scales.numel()
    return Matrices(
        codes.view(dtype),
        codes.data_ptr() + codes_at * codes.element_size(),
        rows,
        terms,
        _each(layout.columns, count) if by_rows else rows,
        by_rows,
        factors,
        scales.data_ptr() + scales_at * scales.element_size() if scaled else None,
    )


def decode(group: OperandGroup) -> Matrices:
    """Decode codes and scales of at most 4 significant bits each to BF16 numbers."""
    layout, codes, count = group.layout, group.codes.view(torch.uint8), len(group)
    rows, columns = _each(layout.shape[0], count), _each(layout.columns, count)
    ends = np.cumsum(rows * columns)
    values = torch.empty(int(ends[-1]), dtype=torch.bfloat16, device=codes.device)
    scales = group.scales.view(torch.uint8)
    codes_at, scales_at = group.places
    addresses = values.data_ptr() + 2 * (ends - rows * columns)
    code_addresses = codes.data_ptr() + codes_at * group.codes.element_size()
    fields = code_addresses, rows, columns, scales.data_ptr() + scales_at, addresses
    table = table_of(decoding_programs(rows, columns), fields, codes.device)
    even = not (rows % DECODED_TILE[0]).any() and not (columns % DECODED_TILE[1]).any()
    constants = (*DECODED_TILE, *elements_of(layout.stored), None, 0, even, table.count)
    options = ("num_warps", 4), ("enable_fp_fusion", False)
    launch = table_launcher(decode_kernel, constants, options, (0, 1, 2), codes.device)
    launch(
        (codes, scales, values, None, None, None, None, OF_THE_TABLE, OF_THE_TABLE, table.entries),
        table.programs,
    )
    terms = _each(layout.shape[1], count)
    return Matrices(values, addresses, rows, terms, columns, True, _factors(group), None)


def _factors(group: OperandGroup) -> np.ndarray:
    """Return the addresses of tensor scales."""
    return group.tensor_scales.data_ptr() + 4 * np.arange(len(group))
