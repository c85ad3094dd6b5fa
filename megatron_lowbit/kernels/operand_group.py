"""Similar operands in common memory, such as of all experts; and as matrices of a GEMM."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_lowbit.kernels.device_tables import make_table
from megatron_lowbit.kernels.launcher import table_launcher
from megatron_lowbit.kernels.of_counts import Numbers, are_multiples, sum_of, sums_before
from megatron_lowbit.kernels.operands import (
    DECODED_TILE,
    ExactBF16,
    Transposed,
    decode_kernel,
    decoding_programs,
    elements_of,
    transposed,
)
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sections import OF_THE_TABLE, uploaded
from megatron_lowbit.kernels.sides import Layout, Memory, layout_of
from megatron_lowbit.kernels.split import ColumnSlices, Rows, RowSlices, as_matrix_list
from megatron_lowbit.numerics import QuantizedTensor, Request
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tensor

_ALIGNMENT = 16
"""Bytes, at whose multiples an operand's codes and scales begin."""
STACKED_TERMS = 128
"""Terms to whose multiple zeros fill up an operand whose columns are stacked."""


class Stack(NamedTuple):
    """The matrix (rows, columns) that operands of one layout are parts of, each (R, K).

    They begin at these rows and columns, int64 (count,).
    """

    rows: int
    columns: int
    first_rows: Numbers
    first_columns: Numbers


class Matrices(NamedTuple):
    """Matrices (R, K) of one dtype in the memory of a device, by their addresses.

    ``template`` is a tensor of their dtype, which keeps their memory. ``terms`` are their K.
    ``steps`` lead from row to row in elements, or from column to column unless ``by_rows``.
    ``factors`` are the addresses of FP32 scalars, 0 for 1; ``scales`` the addresses of FP8
    tiles' FP32 scales, or None: for 1x128 tiles with rows fastest, for 128x128 tiles with columns.
    ``aligned``: addresses and steps are multiples of 16 bytes. ``stack``: where they are parts of
    one matrix, ``template``.
    """

    template: Tensor
    addresses: Numbers
    rows: Numbers
    terms: Numbers
    steps: Numbers
    by_rows: bool
    factors: np.ndarray | int
    scales: Numbers | None
    aligned: bool = True
    stack: Stack | None = None

    def transpose(self) -> "Matrices":
        """Return the transposes, in the same memory."""
        return self._replace(rows=self.terms, terms=self.rows, by_rows=not self.by_rows)


class GroupLayout:
    """Layout of operands that are made of matrices with ``across`` columns each, and any rows.

    Codes and scales begin at whole units of rows; ``operand`` is the layout of an operand of a
    unit's rows. ``multiples`` are those to which the terms of a product, and columns in memory, are
    filled up. ``stacks_columns``: FP8 operands (across, terms) are columns of one matrix, so that a
    GEMM reads all of them alike.
    """

    def __init__(self, request: Request, form: Form, across: int, transposed: bool) -> None:
        self.request, self.form, self.across, self.transposed = request, form, across, transposed
        hadamard, format = request.hadamard, request.quantizer.format
        lanes = 1 if hadamard is None else hadamard.size
        self.multiples = lanes, lanes if form is Form.BF16 else math.lcm(lanes, format.block)
        is_fp8 = form is not Form.BF16 and isinstance(self.of(_ALIGNMENT).format, FP8Tensor)
        self.stacks_columns = transposed and is_fp8
        if self.stacks_columns:
            self.multiples = STACKED_TERMS, STACKED_TERMS
        unit = math.lcm(self.multiples[1] if transposed else format.block_rows, _ALIGNMENT)
        while any(memory.nbytes % _ALIGNMENT for memory in self.of(unit).memory):
            unit *= 2
        self.unit, self.operand = unit, self.of(unit)

    @property
    def values(self) -> bool:
        """True for BF16 numbers."""
        return self.form is Form.BF16

    def of(self, rows: int) -> Layout:
        """Return the layout of an operand of so many rows."""
        size = (self.across, rows) if self.transposed else (rows, self.across)
        return layout_of(self.request, self.form, *size, self.transposed)

    def allocate(self, rows: Rows, tensor_scales: Tensor) -> "OperandGroup":
        """Allocate the operands of matrices of so many rows; tensor scales are there."""
        units, device = rows.in_units(self.unit).total, tensor_scales.device
        codes, scales = (
            memory and torch.empty(units * memory.numel, dtype=memory.dtype, device=device)
            for memory in (self.operand.codes, self.operand.scales)
        )
        return OperandGroup(codes, scales, tensor_scales, self, rows)


group_layout = lru_cache(maxsize=4096)(GroupLayout)
"""The one layout of operands of a request without keys."""


_NO_MEMORY = torch.empty(0, device="meta")


def operand_offsets(layout: GroupLayout, rows: Rows) -> tuple[Matrices, Numbers]:
    """Place operands of matrices of so many rows in memory that begins at address 0.

    Returns:
        The operands, and the columns of a row of codes of each, int64 (count,).
    """
    if layout not in rows.offsets:
        rows.offsets[layout] = _operand_offsets(layout, rows)
    offsets: tuple[Matrices, Numbers] = rows.offsets[layout]
    return offsets


def _operand_offsets(layout: GroupLayout, rows: Rows) -> tuple[Matrices, Numbers]:
    units, unit = rows.in_units(layout.unit), layout.operand
    zeros, across = np.zeros(len(rows), np.int64), np.full(len(rows), layout.across)
    codes, by_rows = units.before * unit.codes.nbytes, not (layout.values and layout.transposed)
    scales = None
    if unit.scales is not None and unit.scales.numel:
        scales = units.before * unit.scales.nbytes
    first, total = units.before * layout.unit, units.total * layout.unit
    stack = None
    if layout.transposed:
        heights = across
        terms, columns = (
            rows.in_units(multiple).numbers * multiple for multiple in layout.multiples
        )
        if layout.stacks_columns:
            codes, columns = first, np.full(len(rows), total)
            stack = Stack(layout.across, total, zeros, first)
    else:
        heights = rows.numbers
        terms, columns = (np.full(len(rows), size) for size in (unit.shape[1], unit.columns))
        stack = Stack(total, unit.columns, first, zeros)
    steps = columns if by_rows else across
    aligned = are_multiples(steps * unit.codes.dtype.itemsize, _ALIGNMENT)
    matrices = Matrices(
        _NO_MEMORY, codes, heights, terms, steps, by_rows, 0, scales, aligned, stack
    )
    return matrices, columns


@dataclass(frozen=True)
class OperandGroup(Sequence[Any]):
    """Similar operands in common memory.

    ``codes`` and ``scales`` (None where nothing is stored) hold one operand after another;
    ``tensor_scales`` is FP32, with one for each at least. ``rows`` are the matrices' rows. With
    ``transposes`` it has the transposes of operands in square blocks, in the same memory.
    """

    codes: Tensor
    scales: Tensor | None
    tensor_scales: Tensor
    layout: GroupLayout
    rows: Rows
    transposes: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> QuantizedTensor | Transposed | ExactBF16:
        if number >= len(self):
            raise IndexError(number)
        rows, group = self.rows.known, self.layout
        layout = group.of(int(rows.on_host[number]))
        before = rows.in_units(group.unit).before
        first, scales = int(before[number]), None  # type: ignore[index]  # an array
        if group.stacks_columns:
            begin = first * group.unit
            codes = self.codes.view(group.across, -1)[:, begin : begin + layout.codes.shape[1]]
        else:
            codes = _part(self.codes, first, group.operand.codes, layout.codes)
        if layout.scales is not None:
            scales = _part(self.scales, first, group.operand.scales, layout.scales)
        operand = layout.operand(codes, scales, self.tensor_scales[number])
        return transposed(operand) if self.transposes else operand

    @property
    def terms(self) -> Numbers:
        """The number of terms of each in a product."""
        offsets, _ = operand_offsets(self.layout, self.rows)
        return offsets.rows if self.transposes else offsets.terms

    @property
    def matrices(self) -> Matrices:
        """The operands, as codes or as exact BF16 numbers."""
        offsets, _ = operand_offsets(self.layout, self.rows)
        scaled = self.layout.operand.tensor_scaled or not self.layout.values
        matrices = offsets._replace(
            template=self.codes,
            addresses=offsets.addresses + self.codes.data_ptr(),
            scales=None if offsets.scales is None else offsets.scales + self.scales.data_ptr(),
            factors=self.tensor_scales.data_ptr() + _scalar_offsets(len(self)) if scaled else 0,
        )
        return matrices.transpose() if self.transposes else matrices


def _part(memory: Tensor, first: int, unit: Memory, part: Memory) -> Tensor:
    begin = first * unit.numel
    return memory[begin : begin + part.numel].view(part.shape)


def place_rows(codes: QuantizedTensor, rows: Rows, request: Request) -> OperandGroup:
    """Copy codes to where :func:`quantize_sections` would write the codes of parts of the rows.

    Args:
        codes: (T, K), whose scales lie within a row.
        rows: numbers of rows of the parts, of sum T.
        request: of the parts, for codes.
    """
    layout = group_layout(request.keyless, Form.CODES, codes.shape[1], False)
    group = layout.allocate(rows, codes.tensor_scale.expand(len(rows)).contiguous())
    device, (total, blocks) = codes.codes.device, codes.scales.shape
    # Numbers of rows, and rows and units before, of each part and then of each row.
    table = torch.empty(3, len(rows), dtype=torch.int64, pin_memory=device.type == "cuda")
    table.numpy()[:] = [rows.on_host, *(rows.in_units(unit).before for unit in (1, layout.unit))]
    of_parts = uploaded(table, device)
    counts, before, units = of_parts.repeat_interleave(of_parts[0], 1, output_size=total)
    number, block = (torch.arange(size, device=device) for size in (total, blocks))
    number -= before
    row = units * layout.unit + number
    found, placed = codes.codes.view(torch.uint8), group.codes.view(torch.uint8)
    placed.view(-1, found.shape[1])[row] = found
    index = row[:, None] * blocks + block
    if layout.operand.rows_fastest:
        first = units * layout.operand.scales.numel + number
        index = first[:, None] + counts[:, None] * block
    group.scales[index] = codes.scales
    return group


@lru_cache(maxsize=1024)
def _scalar_offsets(count: int) -> np.ndarray:
    return 4 * np.arange(count)


def matrices_of(operands: Sequence[Tensor]) -> Matrices:
    """Return BF16 tensors as matrices."""
    if isinstance(operands, ColumnSlices):
        return matrices_of(operands.of).transpose()
    known = as_matrix_list(operands)
    first, rows, count = known.template, known.rows.numbers, len(known)
    by_rows = first.stride(1) == 1
    step = first.stride(0 if by_rows else 1)
    if by_rows or isinstance(known, RowSlices):
        terms = np.full(count, first.shape[1])
    else:
        terms = np.array([x.shape[1] for x in operands])
    # Not of an expanded gradient, nor of every other column.
    contiguous = step > 0 and 1 in first.stride()
    aligned = known.aligned and contiguous and step * first.element_size() % _ALIGNMENT == 0
    steps = np.full(count, step)
    return Matrices(first, known.addresses, rows, terms, steps, by_rows, 0, None, aligned)


def representative_operand(operands: Sequence[Any]) -> Any:
    """Return an operand like all of them; of codes in a group their format."""
    if isinstance(operands, RowSlices):
        return operands.template
    if isinstance(operands, ColumnSlices):
        return operands.of.matrix
    if not isinstance(operands, OperandGroup):
        return operands[0]
    layout = operands.layout
    return ExactBF16(operands.codes, None) if layout.values else layout.operand.format


def decode(group: OperandGroup) -> Matrices:
    """Decode codes and scales of at most 4 significant bits each to BF16 numbers."""
    stored, codes = replace(group, transposes=False).matrices, group.codes.view(torch.uint8)
    rows, (_, columns) = stored.rows, operand_offsets(group.layout, group.rows)
    sizes = rows * columns
    values = torch.empty(sum_of(sizes), dtype=torch.bfloat16, device=codes.device)
    addresses = sums_before(sizes) * 2 + values.data_ptr()
    fields = stored.addresses, rows, columns, stored.scales, addresses
    table = make_table(decoding_programs(rows, columns), fields, codes.device)
    even = are_multiples(rows, DECODED_TILE[0]) and are_multiples(columns, DECODED_TILE[1])
    elements = elements_of(group.layout.operand.format)
    constants = (*DECODED_TILE, *elements, None, 0, even, table.count)
    options = ("num_warps", 4), ("enable_fp_fusion", False)
    launch = table_launcher(decode_kernel, constants, options, (0, 1, 2), codes.device)
    scales = group.scales.view(torch.uint8)
    launch(
        (codes, scales, values, None, None, None, None, OF_THE_TABLE, OF_THE_TABLE, table.entries),
        table.programs,
    )
    terms, factors = stored.terms, stored.factors
    matrices = Matrices(values, addresses, rows, terms, columns, True, factors, None)
    return matrices.transpose() if group.transposes else matrices
