"""Quantization of many matrices of one kind, such as experts' tokens or weights, by one launch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import amax_kernel
from megatron_lowbit.kernels.amaxes import LARGEST_TRANSFORM, amax_tile, measured
from megatron_lowbit.kernels.forms import Form
from megatron_lowbit.kernels.launch import tile_of
from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.operand_group import OperandGroup, allocate
from megatron_lowbit.kernels.quantize import quantize_kernel
from megatron_lowbit.kernels.sections import OF_THE_TABLE, section_table
from megatron_lowbit.kernels.sides import (
    NOTHING,
    Kind,
    Layout,
    kind_of,
    layout_of,
    numbers_of,
    signed,
    signs_of,
    transform_of,
)
from megatron_lowbit.numerics import Requests


def takes_sections(xs: Sequence[Tensor], rows: Requests | None, cols: Requests | None) -> bool:
    """Return True if one launch quantizes these matrices."""
    kinds = {(x.shape[1], x.stride(), x.dtype, x.device) for x in xs}
    requests = [side.like for side in (rows, cols) if side is not None]
    quantizers = [request.quantizer for request in requests]
    return (
        len(kinds) == 1
        and xs[0].dtype in (torch.float32, torch.bfloat16)
        and any(x.numel() for x in xs)
        and all(x.data_ptr() % 16 == 0 for x in xs)
        and bool(requests)
        and all(q.has_kernel and not q.format.row_scaled for q in quantizers)
        and all(r.hadamard is None or r.hadamard.size <= LARGEST_TRANSFORM for r in requests)
    )


def quantize_sections(
    xs: Sequence[Tensor], rows: Requests | None, cols: Requests | None, forms: tuple[Form, Form]
) -> tuple[OperandGroup | None, OperandGroup | None]:
    """Quantize each x (R, C) by its row request, and its transpose by its column request.

    Args:
        xs: FP32 or BF16 matrices that :func:`takes_sections` accepts.
        rows, cols: requests for all; None for no operand.
        forms: of both sides' operands.

    Returns:
        The operands that :func:`quantize_both` gives each by itself.
    """
    first, sides = xs[0], (rows, cols)
    kinds = [
        None if r is None else kind_of(r.like, form) for r, form in zip(sides, forms, strict=True)
    ]
    layouts = [
        None if kind is None else _layouts(kind, xs, side == 1) for side, kind in enumerate(kinds)
    ]
    amaxes = _amaxes(xs, rows, cols, forms)
    groups = [None if one is None else allocate(one, first.device) for one in layouts]
    constants = [None if one is None else one[0].side for one in layouts]
    tile, options = tile_of(*constants)
    fields, arguments = [], []
    for requests, group, amax in zip(sides, groups, amaxes, strict=True):
        fields.append(_fields(requests, group, len(xs)))
        arguments += _arguments(requests, group, amax)
    (row_signs, row_fields), (col_signs, col_fields) = fields
    table = section_table(xs, tile[0], (row_signs, col_signs, *row_fields[:3], *col_fields))
    _launch(
        quantize_kernel,
        xs,
        tile,
        constants,
        (None, table.entries, *arguments),
        table.count,
        options,
    )
    return groups[0], groups[1]


def _launch(
    kernel: Any,
    xs: Sequence[Tensor],
    tile: tuple[int, int],
    sides: Sequence[Any],
    arguments: tuple,
    count: int,
    options: dict[str, int],
) -> None:
    """Launch a kernel on all matrices of a table, in tiles of which each lies in one of them."""
    first, columns = xs[0], xs[0].shape[1]
    rows = [x.shape[0] for x in xs]
    even = all(count % tile[0] == 0 for count in rows) and columns % tile[1] == 0
    programs = sum(cdiv(count, tile[0]) for count in rows) * cdiv(columns, tile[1])
    kernel[(programs,)](
        first, *first.stride(), OF_THE_TABLE, columns, *arguments, *tile, *sides, even,
        count, enable_fp_fusion=False, **options,
    )  # fmt: skip


def _layouts(kind: Kind, xs: Sequence[Tensor], transposed: bool) -> tuple[Layout, ...]:
    """Return the layouts of a side of all matrices; one object for those of one size."""
    columns = xs[0].shape[1]
    found = {}
    for rows in {x.shape[0] for x in xs}:
        shape = (columns, rows) if transposed else (rows, columns)
        found[rows] = layout_of(kind, *shape, transposed)
    return tuple(found[x.shape[0]] for x in xs)


def _fields(
    requests: Requests | None, group: OperandGroup | None, count: int
) -> tuple[list[int], list[list[int]]]:
    """Return a side's keys of signs; and keys of draws, places of codes and scales, columns."""
    zeros = [0] * count
    if requests is None:
        return zeros, [zeros] * 4
    keys = zeros
    if group.layouts[0].side.stochastic:
        keys = [signed(key) for key in requests.draw_keys]
    addresses = [
        zeros
        if memory is None
        else [memory.data_ptr() + place * memory.element_size() for place in places]
        for memory, places in zip((group.codes, group.scales), group.places, strict=True)
    ]
    return _signs(requests, count), [keys, *addresses, [one.columns for one in group.layouts]]


def _signs(requests: Requests, count: int) -> list[int]:
    """Return the keys that signs are drawn from, if they are."""
    hadamard = requests.like.hadamard
    keys = requests.sign_keys or [0] * count
    return [signs_of(hadamard, key) for key in keys]


def _arguments(requests: Requests | None, group: OperandGroup | None, amax: Tensor | None) -> tuple:
    """Return a kernel's arguments for a side; keys and places are in the table."""
    if requests is None:
        return NOTHING
    layout, numbers = group.layouts[0], (None, None)
    if layout.side.stochastic:
        numbers = numbers_of(requests.like, layout, group.codes.device)
    scales = group.scales
    if scales is not None:
        scales = scales.view(torch.uint8) if scales.element_size() == 1 else scales
        scales = scales if scales.numel() else None
    columns = OF_THE_TABLE if layout.transposed else layout.columns
    return columns, amax, group.codes, scales, group.tensor_scales, 0, *numbers, 0


def _amaxes(
    xs: Sequence[Tensor], rows: Requests | None, cols: Requests | None, forms: tuple[Form, Form]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes, FP32 (count,), that tensor scales and folding of both sides need."""
    first, count = xs[0], len(xs)
    kinds = [
        None if side is None else measured(side.like, form)
        for side, form in zip((rows, cols), forms, strict=True)
    ]
    if kinds[0] is None and kinds[1] is None:
        return None, None
    hadamards = [None if kind is None else kind.hadamard for kind in kinds]
    tile = amax_tile(*hadamards)
    signs = [
        [0] * count if hadamard is None else _signs(side, count)
        for side, hadamard in zip((rows, cols), hadamards, strict=True)
    ]
    found = [
        None if kind is None else torch.zeros(count, dtype=torch.int32, device=first.device)
        for kind in kinds
    ]
    table = section_table(xs, tile[0], signs)
    transforms = [transform_of(hadamard) for hadamard in hadamards]
    arguments = (table.entries, found[0], 0, found[1], 0)
    _launch(amax_kernel, xs, tile, transforms, arguments, table.count, {"num_warps": 4})
    return tuple(None if bits is None else bits.view(torch.float32) for bits in found)
