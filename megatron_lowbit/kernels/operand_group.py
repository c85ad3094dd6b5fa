"""Operands of one kind in common memory, such as all experts'; and as matrices of a GEMM."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv
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
from megatron_lowbit.kernels.sides import Layout, memory_of, output
from megatron_lowbit.numerics import QuantizedTensor

_ALIGNMENT = 16
"""Elements at whose multiples an operand begins in the memory of all."""


@dataclass(frozen=True)
class OperandGroup:
    """Operands of one kind in common memory, as a sequence.

    ``codes`` and ``scales`` (None where nothing is stored) hold one operand after another;
    ``tensor_scales`` is FP32 (count,).
    """

    codes: Tensor
    scales: Tensor | None
    tensor_scales: Tensor
    layouts: tuple[Layout, ...]

    def __len__(self) -> int:
        return len(self.layouts)

    def __getitem__(self, number: int) -> QuantizedTensor | Values:
        layout = self.layouts[number]
        memories = zip((self.codes, self.scales), memory_of(layout), self.places, strict=True)
        codes, scales = (
            None if memory is None else _part(whole, places[number], memory.shape)
            for whole, memory, places in memories
        )
        return output(layout, codes, scales, self.tensor_scales[number]).made

    def __iter__(self) -> Iterator[QuantizedTensor | Values]:
        return (self[number] for number in range(len(self)))

    @cached_property
    def places(self) -> tuple[list[int], list[int]]:
        """Return where the operands' codes and scales begin, in elements."""
        return tuple(ends[:-1] for ends in _ends(self.layouts))

    def transpose(self) -> "OperandGroup":
        """Return the transposes of exact numbers, in the same memory."""
        transposes = {
            id(layout): layout._replace(
                shape=layout.shape[::-1],
                columns=layout.shape[0],
                transposed=not layout.transposed,
            )
            for layout in self.layouts
        }
        layouts = tuple(transposes[id(layout)] for layout in self.layouts)
        return OperandGroup(self.codes, self.scales, self.tensor_scales, layouts)


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


def allocate(layouts: tuple[Layout, ...], device: torch.device) -> OperandGroup:
    """Allocate operands."""
    codes, scales = (
        None if memory is None else torch.empty(ends[-1], dtype=memory.dtype, device=device)
        for memory, ends in zip(memory_of(layouts[0]), _ends(layouts), strict=True)
    )
    # No program writes that of an empty matrix.
    tensor_scales = torch.zeros(len(layouts), dtype=torch.float32, device=device)
    return OperandGroup(codes, scales, tensor_scales, layouts)


def _ends(layouts: Sequence[Layout]) -> tuple[list[int], list[int]]:
    """Return where codes and scales begin, in elements, and where the last of them end."""
    sizes = {  # of few different objects
        id(layout): [
            cdiv(math.prod(shape), _ALIGNMENT) * _ALIGNMENT
            for shape in (layout.code_shape, layout.scale_shape)
        ]
        for layout in {id(layout): layout for layout in layouts}.values()
    }
    both = [sizes[id(layout)] for layout in layouts]
    codes, scales = ([0, *accumulate(size[part] for size in both)] for part in (0, 1))
    return codes, scales


def _part(whole: Tensor, place: int, shape: tuple[int, ...]) -> Tensor:
    return whole[place : place + math.prod(shape)].view(shape)


class Matrices(NamedTuple):
    """Matrices (R, K) of one dtype in the memory of a device, by their addresses.

    ``like`` is a tensor of their dtype, which keeps their memory. ``terms`` are their K. ``steps``
    lead from row to row in elements, or from column to column unless ``by_rows``. ``factors`` are
    the addresses of FP32 scalars, 0 for 1; ``scales`` those of FP8 tiles' FP32 scales, or empty:
    of 1x128 tiles with rows fastest, of 128x128 tiles with columns fastest.
    """

    like: Tensor
    addresses: list[int]
    rows: list[int]
    terms: list[int]
    steps: list[int]
    by_rows: bool
    factors: list[int]
    scales: list[int]

    def transpose(self) -> "Matrices":
        """Return the transposes, in the same memory."""
        return self._replace(rows=self.terms, terms=self.rows, by_rows=not self.by_rows)

    @property
    def aligned(self) -> bool:
        """Return True if addresses and steps are multiples of 16 bytes."""
        size = self.like.element_size()
        return not any(address % 16 for address in self.addresses) and not any(
            step * size % 16 for step in self.steps
        )


def matrices_of(operands: OperandGroup | Sequence[Tensor]) -> Matrices:
    """Return operands as matrices: FP8 codes, exact BF16 numbers, or BF16 tensors themselves."""
    if not isinstance(operands, OperandGroup):
        first = operands[0]
        by_rows = first.stride(1) == 1
        return Matrices(
            first,
            [x.data_ptr() for x in operands],
            [x.shape[0] for x in operands],
            [x.shape[1] for x in operands],
            [x.stride(0 if by_rows else 1) for x in operands],
            by_rows,
            [0] * len(operands),
            [],
        )
    layouts = operands.layouts
    side, format = layouts[0].side, layouts[0].stored
    dtype = torch.bfloat16 if side.values else format.element.dtype
    codes_at, scales_at = operands.places
    codes, scales = operands.codes, operands.scales
    by_rows = not (side.values and layouts[0].transposed)
    factors = [0] * len(layouts)
    if not side.values or has_tensor_scale(format):
        base = operands.tensor_scales.data_ptr()
        factors = [base + 4 * number for number in range(len(layouts))]
    tiles = [] if scales is None or not scales.numel() else scales_at
    return Matrices(
        codes.view(dtype),
        [codes.data_ptr() + place * codes.element_size() for place in codes_at],
        [layout.shape[0] for layout in layouts],
        [layout.shape[1] for layout in layouts],
        [layout.columns if by_rows else layout.shape[0] for layout in layouts],
        by_rows,
        factors,
        [scales.data_ptr() + place * scales.element_size() for place in tiles],
    )


def decode(group: OperandGroup) -> Matrices:
    """Decode codes and scales of at most 4 significant bits each to BF16 numbers."""
    layouts, codes = group.layouts, group.codes.view(torch.uint8)
    format, count = layouts[0].stored, len(layouts)
    sizes = [(layout.shape[0], layout.columns) for layout in layouts]
    ends = [0, *accumulate(rows * columns for rows, columns in sizes)]
    values = torch.empty(ends[-1], dtype=torch.bfloat16, device=codes.device)
    scales = group.scales.view(torch.uint8)
    codes_at, scales_at = group.places
    per_code = group.codes.element_size()
    addresses = [values.data_ptr() + 2 * place for place in ends[:-1]]
    rows, columns = zip(*sizes, strict=True)
    fields = (
        [codes.data_ptr() + place * per_code for place in codes_at],
        rows,
        columns,
        [scales.data_ptr() + place for place in scales_at],
        addresses,
    )
    programs = [decoding_programs(*size) for size in sizes]
    table = table_of(programs, fields, codes.device)
    even = all(r % DECODED_TILE[0] == 0 and c % DECODED_TILE[1] == 0 for r, c in sizes)
    decode_kernel[(sum(programs),)](
        codes, scales, values, None, None, None, None, OF_THE_TABLE, OF_THE_TABLE, table.entries,
        *DECODED_TILE, *elements_of(format), None, 0, even, table.count,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    base = group.tensor_scales.data_ptr()
    factors = [base + 4 * number for number in range(count)]
    terms = [layout.shape[1] for layout in layouts]
    return Matrices(values, addresses, list(rows), terms, list(columns), True, factors, [])
