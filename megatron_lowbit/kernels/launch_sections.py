"""Quantization of many matrices of one kind, such as experts' tokens or weights, by one launch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import amax_kernel
from megatron_lowbit.kernels.amaxes import LARGEST_TRANSFORM, amax_tile, measured
from megatron_lowbit.kernels.forms import Form
from megatron_lowbit.kernels.launch import tile_of
from megatron_lowbit.kernels.launcher import table_launcher, tensors_of
from megatron_lowbit.kernels.operand_group import OperandGroup, allocate
from megatron_lowbit.kernels.quantize import quantize_kernel
from megatron_lowbit.kernels.sections import OF_THE_TABLE, Table, section_table
from megatron_lowbit.kernels.sides import (
    NOTHING,
    Numbers,
    layouts_of,
    numbers_of,
    scale_pointer,
    signed,
    signs_of,
    transform_of,
)
from megatron_lowbit.kernels.split import Apart, Split, layouts_in_memory, like
from megatron_lowbit.numerics import Requests


def takes_sections(xs: Split | Apart, rows: Requests | None, cols: Requests | None) -> bool:
    """Return True if one launch quantizes these matrices."""
    requests = [side.like for side in (rows, cols) if side is not None]
    quantizers = [request.quantizer for request in requests]
    return (
        len(layouts_in_memory(xs)) == 1
        and like(xs).dtype in (torch.float32, torch.bfloat16)
        and xs.rows.any()
        and like(xs).shape[1] > 0
        and not (xs.addresses % 16).any()
        and bool(requests)
        and all(q.has_kernel and not q.format.row_scaled for q in quantizers)
        and all(r.hadamard is None or r.hadamard.size <= LARGEST_TRANSFORM for r in requests)
    )


def quantize_sections(
    xs: Split | Apart, rows: Requests | None, cols: Requests | None, forms: tuple[Form, Form]
) -> tuple[OperandGroup | None, OperandGroup | None]:
    """Quantize each x (R, C) by its row request, and its transpose by its column request.

    Args:
        xs: FP32 or BF16 matrices that :func:`takes_sections` accepts.
        rows, cols: requests for all; None for no operand.
        forms: of both sides' operands.

    Returns:
        The operands that :func:`quantize_both` gives each by itself.
    """
    first, sides, count, heights = like(xs), (rows, cols), len(xs), xs.rows
    groups: list[OperandGroup | None] = []
    for requests, form, transposed in zip(sides, forms, (False, True), strict=True):
        if requests is None:
            groups.append(None)
            continue
        size = (first.shape[1], heights) if transposed else (heights, first.shape[1])
        layout = layouts_of(requests.like.kind, form, *size, transposed)
        groups.append(allocate(layout, count, first.device))
    amaxes = _amaxes(xs, rows, cols, forms)
    constants = [None if group is None else group.layout.side for group in groups]
    tile, options = tile_of(*constants)
    fields, arguments = [], ()
    for requests, group, amax in zip(sides, groups, amaxes, strict=True):
        fields.append(_fields(requests, group))
        arguments += _arguments(requests, group, amax)
    (row_signs, row_fields), (col_signs, col_fields) = fields
    table = section_table(xs, tile, (row_signs, col_signs, *row_fields[:3], *col_fields))
    _launch(quantize_kernel, xs, tile, constants, (None, table.entries, *arguments), table, options)
    return groups[0], groups[1]


def _launch(
    kernel: Any,
    xs: Split | Apart,
    tile: tuple[int, int],
    sides: Sequence[Any],
    arguments: tuple,
    table: Table,
    options: dict[str, int],
) -> None:
    """Launch a kernel on all matrices of a table, in tiles of which each lies in one of them."""
    first, columns = like(xs), like(xs).shape[1]
    even = not (xs.rows % tile[0]).any() and columns % tile[1] == 0
    constants = (*tile, *sides, even, table.count)
    kinds = first.dtype, first.stride(), columns, first.device
    given = (first, *first.stride(), OF_THE_TABLE, columns, *arguments)
    launch = table_launcher(
        kernel,
        constants,
        (("enable_fp_fusion", False), *options.items()),
        tensors_of(given),
        *kinds,
    )
    launch(given, table.programs)


def _fields(
    requests: Requests | None, group: OperandGroup | None
) -> tuple[Numbers | list[int], list[Numbers | list[int]]]:
    """Return a side's keys of signs; and keys of draws, places of codes and scales, columns."""
    if requests is None or group is None:
        return 0, [0] * 4
    keys: Numbers | list[int] = 0
    if group.layout.side.stochastic:
        keys = [signed(key) for key in requests.draw_keys]
    addresses = [
        0 if memory is None else memory.data_ptr() + places * memory.element_size()
        for memory, places in zip((group.codes, group.scales), group.places, strict=True)
    ]
    return _signs(requests), [keys, *addresses, group.layout.columns]


def _signs(requests: Requests) -> int | list[int]:
    """Return the keys that signs are drawn from, or one for all."""
    hadamard = requests.like.hadamard
    if not requests.sign_keys:
        return signs_of(hadamard, 0)
    return [signs_of(hadamard, key) for key in requests.sign_keys]


def _arguments(requests: Requests | None, group: OperandGroup | None, amax: Tensor | None) -> tuple:
    """Return a kernel's arguments for a side; keys and places are in the table."""
    if requests is None:
        return NOTHING
    layout, numbers = group.layout, (None, None)
    if layout.side.stochastic:
        numbers = numbers_of(requests.like, layout, group.codes.device)
    scales = None if group.scales is None else scale_pointer(group.scales)
    columns = OF_THE_TABLE if layout.transposed else layout.columns
    return columns, amax, group.codes, scales, group.tensor_scales, 0, *numbers, 0


def _amaxes(
    xs: Split | Apart, rows: Requests | None, cols: Requests | None, forms: tuple[Form, Form]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes, FP32 (count,), that tensor scales and folding of both sides need."""
    count = len(xs)
    kinds = [
        None if side is None else measured(side.like, form)
        for side, form in zip((rows, cols), forms, strict=True)
    ]
    if kinds[0] is None and kinds[1] is None:
        return None, None
    hadamards = [None if kind is None else kind.hadamard for kind in kinds]
    tile = amax_tile(*hadamards)
    signs = [
        0 if hadamard is None else _signs(side)
        for side, hadamard in zip((rows, cols), hadamards, strict=True)
    ]
    found = [
        None if kind is None else torch.zeros(count, dtype=torch.int32, device=like(xs).device)
        for kind in kinds
    ]
    table = section_table(xs, tile, signs)
    transforms = [transform_of(hadamard) for hadamard in hadamards]
    arguments = (table.entries, found[0], 0, found[1], 0)
    _launch(amax_kernel, xs, tile, transforms, arguments, table, {"num_warps": 4})
    return tuple(None if bits is None else bits.view(torch.float32) for bits in found)
