"""Operands of one kind in common memory, such as all experts'; and as matrices of a GEMM."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_lowbit.kernels.forms import Form
from megatron_lowbit.kernels.launcher import table_launcher
from megatron_lowbit.kernels.operands import (
    DECODED_TILE,
    Transposed,
    Values,
    decode_kernel,
    decoding_programs,
    elements_of,
    has_tensor_scale,
    transposed,
)
from megatron_lowbit.kernels.sections import OF_THE_TABLE, table_of
from megatron_lowbit.kernels.sides import Layout, Memory, layout_of, memory_of, output_of
from megatron_lowbit.kernels.split import Rows, Units, looked_at
from megatron_lowbit.numerics import QuantizedTensor, Request
from megatron_lowbit.numerics.block_format import BlockFormat

_ALIGNMENT = 16
"""Bytes, at whose multiples an operand's codes and scales begin."""
Numbers = int | np.ndarray
"""A number, or that of each of many matrices."""


class GroupLayout(NamedTuple):
    """Layout of operands that are made of matrices with ``across`` columns each, and any rows.

    Codes and scales begin at whole units of rows, for which ``codes`` and ``scales`` are the
    memory. ``operand`` is the layout of an operand of a unit's rows.
    """

    kind: Request
    form: Form
    across: int
    transposed: bool
    unit: int
    operand: Layout
    codes: Memory
    scales: Memory | None

    def of(self, rows: int) -> Layout:
        """Return the layout of an operand of so many rows."""
        return _layout(self.kind, self.form, self.across, rows, self.transposed)

    @property
    def format(self) -> BlockFormat:
        """The format that is stored."""
        return self.operand.stored

    @property
    def values(self) -> bool:
        """True for exact numbers in place of codes."""
        return self.operand.side.values

    def terms_of(self, rows: Rows) -> Numbers:
        """Return the terms of a product with each operand: whole transforms."""
        points = _points(self.kind)
        return _multiples(rows, points) if self.transposed else self.operand.shape[1]

    def columns_of(self, rows: Rows) -> Numbers:
        """Return the columns of each operand in memory: whole blocks of codes, too."""
        if self.values or not self.transposed:
            return self.terms_of(rows) if self.values else self.operand.columns
        return _multiples(rows, _along(self.kind))


def _multiples(rows: Rows, unit: int) -> np.ndarray:
    return rows.numbers if unit == 1 else rows.in_units(unit).numbers * unit


def _along(kind: Request) -> int:
    return math.lcm(kind.quantizer.format.block, _points(kind))


def _points(kind: Request) -> int:
    return 1 if kind.hadamard is None else kind.hadamard.size


def _layout(kind: Request, form: Form, across: int, rows: int, transposed: bool) -> Layout:
    size = (across, rows) if transposed else (rows, across)
    return layout_of(kind, form, *size, transposed)


@lru_cache(maxsize=4096)
def group_layout(kind: Request, form: Form, across: int, transposed: bool) -> GroupLayout:
    """Return the layout of operands of a request's kind, or of those of transposed matrices."""
    unit = math.lcm(_along(kind) if transposed else kind.quantizer.format.block_rows, _ALIGNMENT)
    while True:
        layout = _layout(kind, form, across, unit, transposed)
        memories = memory_of(layout)
        if not any(_bytes(one) % _ALIGNMENT for one in memories if one):
            return GroupLayout(kind, form, across, transposed, unit, layout, *memories)
        unit *= 2


def _bytes(memory: Memory) -> int:
    return math.prod(memory.shape) * memory.dtype.itemsize


@dataclass(frozen=True)
class OperandGroup:
    """Operands of one kind in common memory, as a sequence.

    ``codes`` and ``scales`` (None where nothing is stored) hold one operand after another;
    ``tensor_scales`` is FP32, with one for each at least. ``rows`` are those of the matrices.
    """

    codes: Tensor
    scales: Tensor | None
    tensor_scales: Tensor
    layout: GroupLayout
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> QuantizedTensor | Values:
        if number >= len(self):
            raise IndexError(number)
        layout, first = self.layout.of(int(self.rows.numbers[number])), self.units.before[number]
        codes, scales = (
            None if whole is None else _part(whole, int(first), unit, memory)
            for whole, unit, memory in zip(
                (self.codes, self.scales),
                (self.layout.codes, self.layout.scales),
                memory_of(layout),
                strict=True,
            )
        )
        return output_of(layout)(codes, scales, self.tensor_scales[number]).made

    def __iter__(self) -> Iterator[QuantizedTensor | Values]:
        return (self[number] for number in range(len(self)))

    @property
    def units(self) -> Units:
        """The matrices in units of rows."""
        return self.rows.in_units(self.layout.unit)

    @property
    def code_addresses(self) -> np.ndarray:
        """The address of each operand's codes."""
        return self.units.addresses(self.codes, _bytes(self.layout.codes))

    @property
    def scale_addresses(self) -> np.ndarray | None:
        """The address of each operand's scales; None without any."""
        if self.scales is None or not self.scales.numel():
            return None
        return self.units.addresses(self.scales, _bytes(self.layout.scales))


def _part(whole: Tensor, first: int, unit: Memory, memory: Memory) -> Tensor:
    place = first * math.prod(unit.shape)
    return whole[place : place + math.prod(memory.shape)].view(memory.shape)


@dataclass(frozen=True)
class TransposedGroup:
    """The transposes of operands in square blocks, which they share their codes with."""

    of: OperandGroup

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, number: int) -> Transposed | Values:
        return transposed(self.of[number])

    def __iter__(self) -> Iterator[Transposed | Values]:
        return (self[number] for number in range(len(self)))


def one_to_look_at(operands: Sequence[Any]) -> Any:
    """Return an operand of the kind that all are; of codes in a group their format."""
    group = operands.of if isinstance(operands, TransposedGroup) else operands
    if not isinstance(group, OperandGroup):
        return operands[0]
    return Values(group.codes, None) if group.layout.values else group.layout.format


def allocate(layout: GroupLayout, rows: Rows, tensor_scales: Tensor) -> OperandGroup:
    """Allocate the operands of matrices of so many rows; tensor scales are there."""
    units, device = rows.in_units(layout.unit).total, tensor_scales.device
    codes, scales = (
        None
        if memory is None
        else torch.empty(units * math.prod(memory.shape), dtype=memory.dtype, device=device)
        for memory in (layout.codes, layout.scales)
    )
    return OperandGroup(codes, scales, tensor_scales, layout, rows)


class Matrices(NamedTuple):
    """Matrices (R, K) of one dtype in the memory of a device, by their addresses.

    ``like`` is a tensor of their dtype, which keeps their memory. ``terms`` are their K. ``steps``
    lead from row to row in elements, or from column to column unless ``by_rows``. ``factors`` are
    the addresses of FP32 scalars, 0 for 1; ``scales`` those of FP8 tiles' FP32 scales, or None:
    of 1x128 tiles with rows fastest, of 128x128 tiles with columns fastest.
    """

    like: Tensor
    addresses: np.ndarray
    rows: Numbers
    terms: Numbers
    steps: Numbers
    by_rows: bool
    factors: Numbers
    scales: np.ndarray | None

    def transpose(self) -> "Matrices":
        """Return the transposes, in the same memory."""
        return self._replace(rows=self.terms, terms=self.rows, by_rows=not self.by_rows)

    @property
    def aligned(self) -> bool:
        """Return True if addresses and steps are multiples of 16 bytes."""
        steps = np.asarray(self.steps) * self.like.element_size()
        return not ((self.addresses & 15).any() or (steps & 15).any())


def matrices_of(operands: OperandGroup | Sequence[Tensor]) -> Matrices:
    """Return operands as matrices: FP8 codes, exact BF16 numbers, or BF16 tensors themselves."""
    if not isinstance(operands, OperandGroup):
        known = looked_at(operands)
        first, rows = known.like, known.rows.numbers
        by_rows = first.stride(1) == 1
        if by_rows:
            terms, steps = first.shape[1], first.stride(0)
        else:
            terms, steps = np.array([x.shape[1] for x in operands]), first.stride(1)
        return Matrices(first, known.addresses, rows, terms, steps, by_rows, 0, None)
    layout, rows = operands.layout, operands.rows
    dtype = torch.bfloat16 if layout.values else layout.format.element.dtype
    by_rows = not (layout.values and layout.transposed)
    steps = layout.columns_of(rows) if by_rows else layout.across
    scaled = not layout.values or has_tensor_scale(layout.format)
    return Matrices(
        operands.codes.view(dtype),
        operands.code_addresses,
        layout.across if layout.transposed else rows.numbers,
        layout.terms_of(rows),
        steps,
        by_rows,
        _factors(operands) if scaled else 0,
        operands.scale_addresses,
    )


def decode(group: OperandGroup) -> Matrices:
    """Decode codes and scales of at most 4 significant bits each to BF16 numbers."""
    layout, codes, count = group.layout, group.codes.view(torch.uint8), len(group)
    rows, columns = group.rows.numbers, np.broadcast_to(layout.columns_of(group.rows), count)
    if layout.transposed:
        rows = np.broadcast_to(layout.across, count)
    ends = (rows * columns).cumsum()
    values = torch.empty(int(ends[-1]), dtype=torch.bfloat16, device=codes.device)
    scales = group.scales.view(torch.uint8)
    addresses = values.data_ptr() + 2 * (ends - rows * columns)
    fields = group.code_addresses, rows, columns, group.scale_addresses, addresses
    table = table_of(decoding_programs(rows, columns), fields, codes.device)
    even = not (rows % DECODED_TILE[0]).any() and not (columns % DECODED_TILE[1]).any()
    constants = (*DECODED_TILE, *elements_of(layout.format), None, 0, even, table.count)
    options = ("num_warps", 4), ("enable_fp_fusion", False)
    launch = table_launcher(decode_kernel, constants, options, (0, 1, 2), codes.device)
    launch(
        (codes, scales, values, None, None, None, None, OF_THE_TABLE, OF_THE_TABLE, table.entries),
        table.programs,
    )
    terms = layout.terms_of(group.rows)
    return Matrices(values, addresses, rows, terms, columns, True, _factors(group), None)


def _factors(group: OperandGroup) -> np.ndarray:
    """Return the addresses of tensor scales."""
    return group.tensor_scales.data_ptr() + _scalar_places(len(group))


@lru_cache(maxsize=1024)
def _scalar_places(count: int) -> np.ndarray:
    return 4 * np.arange(count)
