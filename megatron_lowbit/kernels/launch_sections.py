"""Quantization of many similar matrices, such as experts' tokens or weights, by one launch."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import AmaxSpec, amax_kernel
from megatron_lowbit.kernels.amaxes import (
    AMAX_TOKENS,
    BITS,
    NO_TRANSFORM,
    amax_spec,
    amax_tile,
    zeros_of,
)
from megatron_lowbit.kernels.device_tables import Entries, make_table
from megatron_lowbit.kernels.hadamard import MAX_LANES
from megatron_lowbit.kernels.launch import NO_SIDE, TILES_DONE, TOKENS, tile_of, views_of
from megatron_lowbit.kernels.launcher import Launcher, cdiv, multiprocessors
from megatron_lowbit.kernels.of_counts import are_multiples, largest_of
from megatron_lowbit.kernels.operand_group import (
    STACKED_TERMS,
    GroupLayout,
    OperandGroup,
    group_layout,
    operand_offsets,
)
from megatron_lowbit.kernels.quantize import SideArguments, quantize_kernel
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sections import OF_THE_TABLE, columns_for
from megatron_lowbit.kernels.sides import signed, signs_of
from megatron_lowbit.kernels.split import SeparateMatrices
from megatron_lowbit.kernels.support import has_kernel
from megatron_lowbit.numerics import Request, Requests

_SCALARS = 4
"""Number to whose multiple scalars are allocated, so that each row of them is aligned."""


def takes_sections(xs: SeparateMatrices, rows: Requests | None, cols: Requests | None) -> bool:
    """Return True if one launch quantizes these matrices."""
    requests = [side.template for side in (rows, cols) if side is not None]
    return (
        xs.alike
        and xs.template.dtype in (torch.float32, torch.bfloat16)
        and xs.rows.in_units(1).total > 0
        and xs.template.shape[1] > 0
        and xs.aligned
        and bool(requests)
        and all(takes_request(request.keyless) for request in requests)
        # Rows and columns are counted from zero.
        and all(r.draw is None or r.draw.rows is r.draw.groups is None for r in requests)
    )


@lru_cache(maxsize=4096)
def takes_request(request: Request) -> bool:
    """Return True for a request that kernels quantize by amaxes of tensors."""
    quantizer, hadamard = request.quantizer, request.hadamard
    return (
        has_kernel(quantizer)
        and not quantizer.format.row_scaled
        and (hadamard is None or hadamard.size <= MAX_LANES.value)
    )


def quantize_sections(
    xs: SeparateMatrices, rows: Requests | None, cols: Requests | None, forms: tuple[Form, Form]
) -> tuple[OperandGroup | None, OperandGroup | None]:
    """Quantize each x (R, C) by its row request, and its transpose by its column request.

    Args:
        xs: FP32 or BF16 matrices that :func:`takes_sections` accepts.
        rows, cols: requests for all; None for no operand.
        forms: of both sides' operands.

    Returns:
        The operands that :func:`quantize_both` gives each by itself.
    """
    first, heights, sides = xs.template, xs.rows, (rows, cols)
    keyless = [side and side.template.keyless for side in sides]
    columns = columns_for(len(xs))
    plan = _plan(
        *keyless, *forms, first.shape[1], first.stride(), first.dtype, first.device, columns
    )
    # Programs add maxima to amaxes, and write no tensor scale of an empty matrix.
    size = 4, cdiv(len(xs), _SCALARS) * _SCALARS
    scalars = zeros_of(size, first.device).unbind()
    groups = [
        layout and layout.allocate(heights, tensor_scales)
        for layout, tensor_scales in zip(plan.layouts, scalars[:2], strict=True)
    ]
    filled = heights.in_units(plan.filled)
    tiles = plan.filled // plan.height
    fields: list[Entries] = [xs.addresses, heights.numbers]
    for requests, group in zip(sides, groups, strict=True):
        fields += _fields(requests, group)
    table = make_table(tiles * filled.numbers, fields, first.device)
    even = are_multiples(heights.numbers, plan.filled)
    given = first, *first.stride(), OF_THE_TABLE, first.shape[1]
    zeros = scalars[2], scalars[2 if plan.shared else 3]
    amaxes = [zero if takes else None for zero, takes in zip(zeros, plan.measures, strict=True)]
    tiles_done = None
    # A GPU starts programs in the order of their numbers, one on each multiprocessor or more: so
    # many of one matrix come to run at the same time.
    programs = largest_of(filled.numbers) * tiles * plan.quantize_tiles
    if plan.shared and programs <= multiprocessors(first.device):
        tiles_done = scalars[3].view(torch.int32)
    elif any(plan.measures):
        by_row, by_col = (zeros[0], None) if plan.shared else amaxes
        plan.amax[even](
            (*given, table.entries, by_row, 0, by_col, 0, None, None, xs.tokens),
            table.programs * plan.amax_tiles,
        )
    row_side, col_side = (_arguments(*side) for side in zip(groups, amaxes, strict=True))
    plan.quantize[even](
        (*given, None, table.entries, tiles_done, xs.tokens, *row_side, *col_side),
        table.programs * plan.quantize_tiles,
    )
    return groups[0], groups[1]


class _Plan(NamedTuple):
    """Quantization of similar matrices, whatever their rows.

    ``measures``: True for a side whose amaxes are taken; ``shared``: they are of the matrices as
    they are. Tiles are ``height`` rows high and cover ``filled`` rows: units to which the rows of a
    matrix are filled up. Launchers are for matrices of any rows, and of whole tiles.
    """

    layouts: tuple[GroupLayout | None, GroupLayout | None]
    measures: tuple[bool, bool]
    shared: bool
    height: int
    filled: int
    amax: list[Launcher]
    amax_tiles: int
    quantize: list[Launcher]
    quantize_tiles: int


@lru_cache(maxsize=4096)
def _plan(
    row: Request | None,
    col: Request | None,
    row_form: Form,
    col_form: Form,
    across: int,
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    count: int,
) -> _Plan:
    """Plan what matrices with ``across`` columns take, in a table of ``count`` columns."""
    layouts: list[GroupLayout | None] = []
    amaxes: list[AmaxSpec | None] = []
    for request, form, transposed in ((row, row_form, False), (col, col_form, True)):
        layouts.append(request and group_layout(request, form, across, transposed))
        amaxes.append(request and amax_spec(request, form))
    written = [layout and layout.operand for layout in layouts]
    specs = [layout and layout.spec for layout in written]
    tile, options = tile_of(*specs)
    amax_shape = amax_tile(*amaxes, height=tile[0])
    tile = amax_shape[0], tile[1]  # a table counts tiles of one height
    measures = amaxes[0] is not None, amaxes[1] is not None
    shared = any(measures) and set(amaxes) <= {None, NO_TRANSFORM}

    def launchers(
        kernel: Any, tile: tuple[int, int], *sides: Any, **options: Any
    ) -> list[Launcher]:
        # All that a launch gives is aligned, or in the table.
        return [
            Launcher(kernel, 0, (*tile, *sides, even, count), enable_fp_fusion=False, **options)
            for even in (False, across % tile[1] == 0)
        ]

    sides = [NO_TRANSFORM, None] if shared else amaxes
    views = views_of(*written)
    return _Plan(
        (layouts[0], layouts[1]),
        measures,
        shared,
        tile[0],
        STACKED_TERMS if layouts[1] is not None and layouts[1].stacks_columns else tile[0],
        launchers(amax_kernel, amax_shape, *sides, varying=(AMAX_TOKENS,), views=BITS, num_warps=4),
        cdiv(across, amax_shape[1]),
        launchers(
            quantize_kernel, tile, *specs, varying=(TILES_DONE, TOKENS), views=views, **options
        ),
        cdiv(across, tile[1]),
    )


def _fields(requests: Requests | None, group: OperandGroup | None) -> list[Entries]:
    """Return a side's keys of signs and of draws, addresses of codes and scales, and columns."""
    if requests is None or group is None:
        return [0] * 5
    hadamard, keys = requests.template.hadamard, requests.draw_keys
    signs: Entries = signs_of(hadamard, 0)
    if requests.sign_keys:
        signs = [signs_of(hadamard, key) for key in requests.sign_keys]
    draw_keys = [signed(key) for key in keys] if group.layout.operand.spec.stochastic else 0
    stored, columns = group.matrices, operand_offsets(group.layout, group.rows)[1]
    scales = 0 if stored.scales is None else stored.scales
    return [signs, draw_keys, stored.addresses, scales, columns]


def _arguments(group: OperandGroup | None, amax: Tensor | None) -> SideArguments:
    """Return a kernel's arguments for a side; keys and addresses are in the table."""
    if group is None:
        return NO_SIDE
    layout = group.layout
    columns = OF_THE_TABLE if layout.transposed else layout.operand.columns
    scales = None if group.matrices.scales is None else group.scales
    return SideArguments(columns, amax, group.codes, scales, group.tensor_scales)
