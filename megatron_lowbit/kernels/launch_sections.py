"""Quantization of many matrices of one kind, such as experts' tokens or weights, by one launch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import amax_kernel
from megatron_lowbit.kernels.amaxes import LARGEST_TRANSFORM, amax_tile, measured
from megatron_lowbit.kernels.forms import Form
from megatron_lowbit.kernels.launch import tile_of
from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.operands import Values
from megatron_lowbit.kernels.quantize import quantize_kernel
from megatron_lowbit.kernels.sections import section_table
from megatron_lowbit.kernels.sides import (
    NOTHING,
    Layout,
    key_of,
    kind_of,
    layout_of,
    memory_of,
    numbers_of,
    output,
    signs_of,
    transform_of,
)
from megatron_lowbit.numerics import QuantizedTensor, Request

Requests = Sequence[Request] | None
"""Requests of all matrices for one side, which differ in their keys alone; None for no operand."""
_ALIGNMENT = 16
"""Elements at whose multiples an operand begins in the memory of all."""
_OF_THE_TABLE = 16
"""Argument in whose place the kernel reads the table: Triton compiles anew for other kinds."""


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

    def __iter__(self) -> Iterator[QuantizedTensor | Values]:
        codes_at, scales_at = (_places(self.layouts, part)[:-1] for part in (0, 1))
        for layout, tensor_scale, code_place, scale_place in zip(
            self.layouts, self.tensor_scales.unbind(), codes_at, scales_at, strict=True
        ):
            codes, scales = memory_of(layout)
            yield output(
                layout,
                _part(self.codes, code_place, codes.shape),
                None if scales is None else _part(self.scales, scale_place, scales.shape),
                tensor_scale,
            ).made


def _part(whole: Tensor, place: int, shape: tuple[int, ...]) -> Tensor:
    return whole[place : place + math.prod(shape)].view(shape)


def _places(layouts: Sequence[Layout], part: int) -> list[int]:
    """Return where codes (``part`` 0) or scales (1) begin, in elements, and where the last end."""
    places = [0]
    for layout in layouts:
        memory = memory_of(layout)[part]
        size = 0 if memory is None else math.prod(memory.shape)
        places.append(places[-1] + cdiv(size, _ALIGNMENT) * _ALIGNMENT)
    return places


def takes_sections(xs: Sequence[Tensor], rows: Requests, cols: Requests) -> bool:
    """Return True if one launch quantizes these matrices."""
    kinds = {(x.shape[1], x.stride(), x.dtype, x.device) for x in xs}
    requests = [side[0] for side in (rows, cols) if side is not None]
    quantizers = [request.quantizer for request in requests]
    return (
        len(kinds) == 1
        and xs[0].dtype in (torch.float32, torch.bfloat16)
        and all(x.numel() for x in xs)
        and bool(requests)
        and all(q.has_kernel and not q.format.row_scaled for q in quantizers)
        and all(r.hadamard is None or r.hadamard.size <= LARGEST_TRANSFORM for r in requests)
        and not any(isinstance(_key(request), Tensor) for request in requests)
    )


def _key(request: Request) -> int | Tensor:
    return request.sign_key if request.draw is None else request.draw.key


def quantize_sections(
    xs: Sequence[Tensor], rows: Requests, cols: Requests, forms: tuple[Form, Form]
) -> tuple[OperandGroup | None, OperandGroup | None]:
    """Quantize each x (R, C) by its row request, and its transpose by its column request.

    Args:
        xs: FP32 or BF16 matrices that :func:`takes_sections` accepts.
        rows, cols: a request for each.
        forms: of both sides' operands.

    Returns:
        The operands that :func:`quantize_both` gives each by itself.
    """
    first, sides = xs[0], (rows, cols)
    kinds = [
        None if r is None else kind_of(r[0], form) for r, form in zip(sides, forms, strict=True)
    ]
    layouts = [
        None if kind is None else tuple(_layout(kind, x.shape, side == 1) for x in xs)
        for side, kind in enumerate(kinds)
    ]
    amaxes = _amaxes(xs, rows, cols, forms)
    groups = [None if one is None else _allocate(one, first.device) for one in layouts]
    constants = [None if one is None else one[0].side for one in layouts]
    tile, options = tile_of(*constants)
    fields, arguments = [], []
    for requests, group, amax in zip(sides, groups, amaxes, strict=True):
        fields.append(_fields(requests, group, len(xs)))
        arguments += _arguments(requests, group, amax)
    (row_signs, row_fields), (col_signs, col_fields) = fields
    table = section_table(xs, tile[0], (row_signs, col_signs, *row_fields[:3], *col_fields))
    _launch(quantize_kernel, xs, tile, constants, (None, table, *arguments), table, options)
    return groups[0], groups[1]


def _launch(
    kernel: Any,
    xs: Sequence[Tensor],
    tile: tuple[int, int],
    sides: Sequence[Any],
    arguments: tuple,
    table: Tensor,
    options: dict[str, int],
) -> None:
    """Launch a kernel on all matrices of a table, in tiles of which each lies in one of them."""
    first, columns = xs[0], xs[0].shape[1]
    even = all(len(x) % tile[0] == 0 for x in xs) and columns % tile[1] == 0
    programs = sum(cdiv(len(x), tile[0]) for x in xs) * cdiv(columns, tile[1])
    kernel[(programs,)](
        first, *first.stride(), _OF_THE_TABLE, columns, *arguments, *tile, *sides, even,
        table.shape[1], enable_fp_fusion=False, **options,
    )  # fmt: skip


def _layout(kind: object, shape: tuple[int, int], transposed: bool) -> Layout:
    rows, columns = shape[::-1] if transposed else shape
    return layout_of(kind, rows, columns, transposed)


def _allocate(layouts: tuple[Layout, ...], device: torch.device) -> OperandGroup:
    codes, scales = (
        None
        if memory is None
        else torch.empty(_places(layouts, part)[-1], dtype=memory.dtype, device=device)
        for part, memory in enumerate(memory_of(layouts[0]))
    )
    tensor_scales = torch.empty(len(layouts), dtype=torch.float32, device=device)
    return OperandGroup(codes, scales, tensor_scales, layouts)


def _fields(
    requests: Requests, group: OperandGroup | None, count: int
) -> tuple[list[int], list[list[int]]]:
    """Return a side's keys of signs; and keys of draws, places of codes and scales, columns."""
    zeros = [0] * count
    if requests is None:
        return zeros, [zeros] * 4
    signs = [signs_of(request.hadamard, request.sign_key) for request in requests]
    stochastic = group.layouts[0].side.stochastic
    keys = [key_of(request) for request in requests] if stochastic else zeros
    addresses = [
        zeros
        if memory is None
        else [memory.data_ptr() + place * memory.element_size() for place in places[:-1]]
        for memory, places in (
            (group.codes, _places(group.layouts, 0)), (group.scales, _places(group.layouts, 1)),
        )
    ]  # fmt: skip
    return signs, [keys, *addresses, [layout.columns for layout in group.layouts]]


def _arguments(requests: Requests, group: OperandGroup | None, amax: Tensor | None) -> tuple:
    """Return a kernel's arguments for a side; keys and places are in the table."""
    if requests is None:
        return NOTHING
    layout, numbers = group.layouts[0], (None, None)
    if layout.side.stochastic:
        numbers = numbers_of(requests[0], layout, group.codes.device)
    scales = group.scales
    if scales is not None:
        scales = scales.view(torch.uint8) if scales.element_size() == 1 else scales
        scales = scales if scales.numel() else None
    columns = _OF_THE_TABLE if layout.transposed else layout.columns
    return columns, amax, group.codes, scales, group.tensor_scales, 0, *numbers, 0


def _amaxes(
    xs: Sequence[Tensor], rows: Requests, cols: Requests, forms: tuple[Form, Form]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes, FP32 (count,), that tensor scales and folding of both sides need."""
    sides = [
        None
        if requests is None or measured(requests[0], form) is None
        else [measured(request, form) for request in requests]
        for requests, form in zip((rows, cols), forms, strict=True)
    ]
    if sides[0] is None and sides[1] is None:
        return None, None
    first, count = xs[0], len(xs)
    hadamards = [None if side is None else side[0].hadamard for side in sides]
    tile = amax_tile(*hadamards)
    signs = [
        [0] * count if side is None else [signs_of(r.hadamard, r.sign_key) for r in side]
        for side in sides
    ]
    found = [
        None if side is None else torch.zeros(count, dtype=torch.int32, device=first.device)
        for side in sides
    ]
    table = section_table(xs, tile[0], signs)
    transforms = [transform_of(hadamard) for hadamard in hadamards]
    arguments = (table, found[0], 0, found[1], 0)
    _launch(amax_kernel, xs, tile, transforms, arguments, table, {"num_warps": 4})
    return tuple(None if bits is None else bits.view(torch.float32) for bits in found)
