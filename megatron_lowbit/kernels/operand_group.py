"""Operands of one kind in common memory, such as all experts'; and as matrices of a GEMM."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_lowbit.kernels.launcher import table_launcher
from megatron_lowbit.kernels.operands import (
    DECODED_TILE,
    ExactBF16,
    Transposed,
    decode_kernel,
    decoding_programs,
    elements_of,
    has_tensor_scale,
    transposed,
)
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sections import OF_THE_TABLE, table_of
from megatron_lowbit.kernels.sides import Layout, Memory, layout_of, memory_of, output_of
from megatron_lowbit.kernels.split import Rows, as_matrix_list
from megatron_lowbit.numerics import QuantizedTensor, Request
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tensor

_ALIGNMENT = 16
"""Bytes, at whose multiples an operand's codes and scales begin."""
STACKED_TERMS = 128
"""Terms to whose multiple zeros fill up an operand whose columns are stacked."""


class GroupLayout:
    """Layout of operands that are made of matrices with ``across`` columns each, and any rows.

    Codes and scales begin at whole units of rows, for which ``codes`` and ``scales`` are the
    memory. ``operand`` is the layout of an operand of a unit's rows. ``multiples`` are those to
    which the terms of a product, and columns in memory, are filled up; ``filled`` are the two
    numbers themselves of an operand that is not transposed. ``stacks_columns``: FP8 operands
    (across, terms) are columns of one matrix, so that a GEMM reads all of them alike.
    """

    def __init__(self, kind: Request, form: Form, across: int, transposed: bool) -> None:
        self.kind, self.form, self.across, self.transposed = kind, form, across, transposed
        format, lanes = kind.quantizer.format, 1 if kind.hadamard is None else kind.hadamard.size
        self.multiples = lanes, lanes if form is Form.BF16 else math.lcm(lanes, format.block)
        is_fp8 = form is not Form.BF16 and isinstance(self.of(_ALIGNMENT).stored, FP8Tensor)
        self.stacks_columns = transposed and is_fp8
        if self.stacks_columns:
            self.multiples = STACKED_TERMS, STACKED_TERMS
        unit = math.lcm(self.multiples[1] if transposed else format.block_rows, _ALIGNMENT)
        while any(_bytes(one) % _ALIGNMENT for one in memory_of(self.of(unit)) if one):
            unit *= 2
        self.unit, self.operand = unit, self.of(unit)
        self.codes, self.scales = memory_of(self.operand)
        self.format, self.values = self.operand.stored, self.operand.side.values
        self.filled = self.operand.shape[1], self.operand.columns

    def of(self, rows: int) -> Layout:
        """Return the layout of an operand of so many rows."""
        size = (self.across, rows) if self.transposed else (rows, self.across)
        return layout_of(self.kind, self.form, *size, self.transposed)


group_layout = lru_cache(maxsize=4096)(GroupLayout)
"""The one layout of operands of a request's kind."""


class Stack(NamedTuple):
    """The matrix (rows, columns) that operands of one layout are parts of, each (R, K).

    They begin at these rows and columns, int64 (count,).
    """

    rows: int
    columns: int
    first_rows: np.ndarray
    first_columns: np.ndarray


class Places(NamedTuple):
    """Sizes and offsets of operands of one layout in their memory, int64 (count,).

    ``codes`` and ``scales`` are the bytes before each operand's, and ``units`` are all units.
    ``rows`` and ``terms`` are its size, ``columns`` those of a row of codes, and ``steps`` are the
    elements from one row, or column unless ``by_rows``, to the next. ``aligned``: steps are
    multiples of 16 bytes. ``stack``: the one matrix that all are parts of, or None.
    """

    codes: np.ndarray
    scales: np.ndarray | None
    units: int
    rows: np.ndarray
    terms: np.ndarray
    columns: np.ndarray
    steps: np.ndarray
    by_rows: bool
    aligned: bool
    stack: Stack | None


@lru_cache(maxsize=1024)
def operand_offsets(layout: GroupLayout, rows: Rows) -> Places:
    """Return where operands of matrices of so many rows lie."""
    units = rows.in_units(layout.unit)
    has_scales = layout.scales is not None and math.prod(layout.scales.shape)
    zeros, across = np.zeros(len(rows), np.int64), np.full(len(rows), layout.across)
    codes, by_rows = units.before * _bytes(layout.codes), not (layout.values and layout.transposed)
    if layout.transposed:
        own, filled = across, [rows.in_units(one).numbers * one for one in layout.multiples]
    else:
        own, filled = rows.numbers, [np.full(len(rows), one) for one in layout.filled]
    terms, columns, stack = *filled, None
    if layout.stacks_columns:
        codes, whole = units.before * layout.unit, units.total * layout.unit
        columns, stack = np.full(len(rows), whole), Stack(layout.across, whole, zeros, codes)
    elif not layout.transposed:
        first, whole = units.before * layout.unit, units.total * layout.unit
        stack = Stack(whole, layout.filled[1], first, zeros)
    steps = columns if by_rows else across
    aligned = not (steps * layout.codes.dtype.itemsize % _ALIGNMENT).any()
    scales = units.before * _bytes(layout.scales) if has_scales else None
    return Places(codes, scales, units.total, own, terms, columns, steps, by_rows, aligned, stack)


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

    def __getitem__(self, number: int) -> QuantizedTensor | ExactBF16:
        if number >= len(self):
            raise IndexError(number)
        whole, layout = self.layout, self.layout.of(int(self.rows.numbers[number]))
        first = int(self.rows.in_units(whole.unit).before[number])
        memory, scales = memory_of(layout)[0], None
        if whole.stacks_columns:
            begin, columns = first * whole.unit, memory.shape[1]
            codes = self.codes.view(whole.across, -1)[:, begin : begin + columns]
        else:
            codes = _part(self.codes, first, whole.codes, memory)
        if self.scales is not None:
            scales = _part(self.scales, first, whole.scales, memory_of(layout)[1])
        return output_of(layout)(codes, scales, self.tensor_scales[number]).operand

    def __iter__(self) -> Iterator[QuantizedTensor | ExactBF16]:
        return (self[number] for number in range(len(self)))

    @property
    def places(self) -> Places:
        """Sizes and offsets of the operands."""
        return operand_offsets(self.layout, self.rows)

    @property
    def code_addresses(self) -> np.ndarray:
        """The address of each operand's codes."""
        return self.places.codes + self.codes.data_ptr()

    @property
    def scale_addresses(self) -> np.ndarray | None:
        """The address of each operand's scales; None without any."""
        places = self.places.scales
        return None if places is None else places + self.scales.data_ptr()


def _part(whole: Tensor, first: int, unit: Memory, memory: Memory) -> Tensor:
    place = first * math.prod(unit.shape)
    return whole[place : place + math.prod(memory.shape)].view(memory.shape)


@dataclass(frozen=True)
class TransposedGroup:
    """The transposes of operands in square blocks, which they share their codes with."""

    of: OperandGroup

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, number: int) -> Transposed | ExactBF16:
        return transposed(self.of[number])

    def __iter__(self) -> Iterator[Transposed | ExactBF16]:
        return (self[number] for number in range(len(self)))


def representative_operand(operands: Sequence[Any]) -> Any:
    """Return an operand of the kind that all are; of codes in a group their format."""
    group = operands.of if isinstance(operands, TransposedGroup) else operands
    if not isinstance(group, OperandGroup):
        return operands[0]
    return ExactBF16(group.codes, None) if group.layout.values else group.layout.format


def allocate(layout: GroupLayout, rows: Rows, tensor_scales: Tensor) -> OperandGroup:
    """Allocate the operands of matrices of so many rows; tensor scales are there."""
    units, device = operand_offsets(layout, rows).units, tensor_scales.device
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
    of 1x128 tiles with rows fastest, of 128x128 tiles with columns fastest. ``aligned``: addresses
    and steps are multiples of 16 bytes. ``stack``: where they are parts of one matrix, ``like``.
    """

    template: Tensor
    addresses: np.ndarray
    rows: np.ndarray
    terms: np.ndarray
    steps: np.ndarray
    by_rows: bool
    factors: np.ndarray | int
    scales: np.ndarray | None
    aligned: bool = True
    stack: Stack | None = None

    def transpose(self) -> "Matrices":
        """Return the transposes, in the same memory."""
        return self._replace(rows=self.terms, terms=self.rows, by_rows=not self.by_rows)


def matrices_of(operands: OperandGroup | Sequence[Tensor]) -> Matrices:
    """Return operands as matrices: FP8 codes, exact BF16 numbers, or BF16 tensors themselves."""
    if not isinstance(operands, OperandGroup):
        known = as_matrix_list(operands)
        first, rows, count = known.template, known.rows.numbers, len(known)
        by_rows = first.stride(1) == 1
        if by_rows:
            step, terms = first.stride(0), np.full(count, first.shape[1])
        else:
            step, terms = first.stride(1), np.array([x.shape[1] for x in operands])
        steps = np.full(count, step)
        aligned = known.aligned and step * first.element_size() % _ALIGNMENT == 0
        return Matrices(first, known.addresses, rows, terms, steps, by_rows, 0, None, aligned)
    layout, places = operands.layout, operands.places
    scaled = not layout.values or has_tensor_scale(layout.format)
    return Matrices(
        operands.codes,
        operands.code_addresses,
        places.rows,
        places.terms,
        places.steps,
        places.by_rows,
        _factors(operands) if scaled else 0,
        operands.scale_addresses,
        places.aligned,
        places.stack,
    )


def decode(group: OperandGroup) -> Matrices:
    """Decode codes and scales of at most 4 significant bits each to BF16 numbers."""
    layout, places, codes = group.layout, group.places, group.codes.view(torch.uint8)
    rows, columns = places.rows, places.columns
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
    return Matrices(values, addresses, rows, places.terms, columns, True, _factors(group), None)


def _factors(group: OperandGroup) -> np.ndarray:
    """Return the addresses of tensor scales."""
    return group.tensor_scales.data_ptr() + _scalar_places(len(group))


@lru_cache(maxsize=1024)
def _scalar_places(count: int) -> np.ndarray:
    return 4 * np.arange(count)
