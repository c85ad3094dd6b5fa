"""Quantization of a matrix and its transpose by one launch, or one for each amax more."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.kernels.amaxes import (
    AmaxPass,
    amax_pass,
    measured,
    scale_amaxes,
)
from megatron_lowbit.kernels.delayed import own_amax, record_amax
from megatron_lowbit.kernels.hadamard import MAX_LANES
from megatron_lowbit.kernels.launcher import Launcher, tile_launcher
from megatron_lowbit.kernels.operands import ExactBF16
from megatron_lowbit.kernels.quantize import QuantizeSpec, quantize_kernel
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sides import (
    LANES,
    NO_SIDE,
    Layout,
    Output,
    allocator,
    arguments,
    draws_signs,
    layout_of,
    taken_as,
)
from megatron_lowbit.numerics import DelayedAmax, QuantizedTensor, Request, ScaleAmaxes
from megatron_lowbit.numerics import quantize_both as reference
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tensor

_CURRENT_AMAX, TILES_DONE, _ROW = 5, 7, 8
"""Places of the kernel's arguments: x's own amax, counts of tiles that have given their amaxes, and
the first of the row side."""
_AMAX, _KEYS, _SIGNS = 1, (5, 6, 7), 8
"""Places of a side's arguments that differ between calls: amax, key and numbers, signs."""
_CODES = 2
"""Place of a side's codes, which scales follow."""
_REGISTERS = {64: 168, 128: 255}
"""Registers of a thread by the lanes of a transform that it holds."""


def quantize_both(
    x: Tensor,
    row: Request | None,
    col: Request | None,
    amaxes: ScaleAmaxes = (None, None),
    forms: tuple[Form, Form] = (Form.CODES, Form.CODES),
) -> tuple[QuantizedTensor | ExactBF16 | None, QuantizedTensor | ExactBF16 | None]:
    """Quantize x (R, C) as ``row`` says and its transpose as ``col`` says, in one pass over x.

    A format with a scale a row takes a pass of its own for the amaxes, as do folding and a format
    with a scale a tensor whose amax is not in ``amaxes``; one of earlier steps takes none where x
    itself is cast. The bits are those of
    :func:`megatron_lowbit.numerics.quantize_both`, in the form of each side.

    Raises:
        TypeError: x is neither FP32 nor BF16.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"quantization takes float32 or bfloat16, not {x.dtype}")
    if not x.numel():
        return reference(x, row, col)
    kinds = row and row.kind, col and col.kind
    plan = _plan(x.shape, x.stride(), x.dtype, x.device, *kinds, *forms, row is col)
    if plan is None:
        # A tile that holds whole transforms in both directions would not fit into registers.
        by_row, _ = quantize_both(x, row, None, amaxes, forms)
        return by_row, quantize_both(x, None, col, amaxes, forms)[1]
    current_amax, known = None, amaxes
    if plan.casts and _are_delayed((row, col), amaxes):
        known = [None if amax is None else amax.earlier for amax in amaxes]
        current_amax = own_amax(x, known)
    elif plan.takes_amax:
        known = scale_amaxes(x, row, col, amaxes, plan.measure)
    row_arguments, by_row = _outputs(plan.row, row, known[0])
    col_arguments, by_col = _outputs(plan.col, col, known[1])
    plan.launch(
        (x, *x.stride(), *x.shape, current_amax, None, None, *row_arguments, *col_arguments)
    )
    if current_amax is not None:
        record_amax(current_amax, amaxes, (by_row, by_col))
    return by_row, by_col


def _are_delayed(requests: Sequence[Request | None], amaxes: ScaleAmaxes) -> bool:
    """Return True if the sides that are wanted are scaled by amaxes of earlier steps."""
    return all(
        request is None or isinstance(amax, DelayedAmax)
        for request, amax in zip(requests, amaxes, strict=True)
    )


class _SidePlan(NamedTuple):
    """Layout of a side, what allocates it, and whether it is made from an amax."""

    layout: Layout
    allocate: Callable[[], Output]
    takes_amax: bool


def _outputs(
    plan: _SidePlan | None, request: Request | None, amax: Tensor | None
) -> tuple[tuple, QuantizedTensor | ExactBF16 | None]:
    """Allocate a side's operand; return the kernel's arguments for it, and the operand."""
    if plan is None:
        return NO_SIDE, None
    output = plan.allocate()
    return arguments(
        plan.layout, output, request, amax if plan.takes_amax else None
    ), output.operand


class _Plan(NamedTuple):
    """Plan of both sides, and the launcher.

    ``measure`` takes the amaxes of tensors. ``casts``: both sides cast x itself, by scales of the
    tensor.
    """

    row: _SidePlan | None
    col: _SidePlan | None
    launch: Launcher
    takes_amax: bool
    measure: AmaxPass | None
    casts: bool


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    row: Request | None,
    col: Request | None,
    row_form: Form,
    col_form: Form,
    same: bool,
) -> _Plan | None:
    """Plan the quantization of matrices of one shape, dtype and device; None for two passes.

    ``same``: both sides are of one request.
    """
    if row and col and max(_lanes(row), _lanes(col)) > MAX_LANES.value:
        return None
    by_row = None if row is None else _side_plan(row, row_form, shape, device, False)
    by_col = None if col is None else _side_plan(col, col_form, shape[::-1], device, True)
    sides = [None if one is None else one.layout.side for one in (by_row, by_col)]
    tile, options = tile_of(*sides)
    wanted = [(kind, form) for kind, form in ((row, row_form), (col, col_form)) if kind]
    casts = all(_casts(kind, form) for kind, form in wanted)
    current = (_CURRENT_AMAX,) if casts else ()
    places = _varying(by_row, _ROW) + _varying(by_col, _ROW + len(NO_SIDE))
    views = views_of(by_row and by_row.layout, by_col and by_col.layout)
    launch = tile_launcher(
        quantize_kernel,
        shape,
        tile,
        *sides,
        0,
        varying=(0, *current, *places),
        views=views,
        **options,
    )
    taken = row and measured(row, row_form), col and measured(col, col_form)
    return _Plan(
        by_row,
        by_col,
        launch,
        takes_amax=any(one is not None and one.takes_amax for one in (by_row, by_col)),
        measure=amax_pass(shape, strides, dtype, device, *taken, same),
        casts=casts,
    )


def views_of(row: Layout | None, col: Layout | None) -> dict[int, torch.dtype]:
    """Return as which dtypes the kernel takes codes and scales, by their places."""
    found = {}
    for layout, first in ((row, _ROW), (col, _ROW + len(NO_SIDE))):
        for place, dtype in enumerate(() if layout is None else taken_as(layout), first + _CODES):
            if dtype is not None:
                found[place] = dtype
    return found


def _side_plan(
    kind: Request, form: Form, shape: tuple[int, int], device: torch.device, transposed: bool
) -> _SidePlan:
    layout, format = layout_of(kind, form, *shape, transposed), kind.quantizer.format
    takes_amax = format.tensor_scaled or format.row_scaled or form is Form.FOLDED
    return _SidePlan(layout, allocator(layout, device), takes_amax)


def _varying(plan: _SidePlan | None, first: int) -> tuple[int, ...]:
    """Return the places of a side's arguments whose kind may differ; ``first`` is its first."""
    if plan is None:
        return ()
    side = plan.layout.side
    amax = (_AMAX,) if plan.takes_amax else ()
    drawn = (_SIGNS,) if draws_signs(side.transform) else ()
    places = amax + (_KEYS if side.stochastic else ()) + drawn
    return tuple(first + place for place in places)


def _lanes(request: Request) -> int:
    return request.hadamard.size if request.hadamard else 1


def _casts(kind: Request, form: Form) -> bool:
    """Return True for a side that casts x itself by a scale of the tensor."""
    casts = isinstance(kind.quantizer.format, FP8Tensor) and kind.hadamard is None
    return casts and form is Form.CODES


def tile_of(
    row: QuantizeSpec | None, col: QuantizeSpec | None
) -> tuple[tuple[int, int], dict[str, int]]:
    """Return rows and columns of the tile, and the launch's options.

    They were found by trying on an H200; those of 128 lanes are the least that holds them.
    """
    sides = [side for side in (row, col) if side is not None]
    height, width = 32 if col is None else 64, 128
    if any(side.transform and side.transform.size > MAX_LANES.value for side in sides):
        height = width = 32
    lanes, longest = all(side.lanes for side in sides), max(side.lanes for side in sides)
    if lanes and all(side.block <= LANES for side in sides):
        if longest > LANES:
            return (longest, 128), {"num_warps": 4, "maxnreg": _REGISTERS[longest]}
        # Fewer values a thread, so that more threads hide each other's waiting.
        if any(side.stochastic for side in sides):
            return (32, 128), {"num_warps": 4}
        waits = any(s.transform or s.block_rows > 1 or s.from_numbers for s in sides)
        return (height, 64 if waits else 128), {"num_warps": 4}
    for side, is_col in ((row, False), (col, True)):
        if side is not None:
            along = max(side.block, side.transform.size if side.transform else 0, side.lanes)
            height = max(height, along if is_col else side.block_rows)
            width = max(width, side.block_rows if is_col else along)
    if lanes:
        warps = 4 if longest > LANES else max(4, height * width // 2048)
        return (height, width), {"num_warps": warps, "maxnreg": _REGISTERS.get(longest, 80)}
    return (height, width), {"num_warps": max(8, height * width // 2048), "maxnreg": 128}
