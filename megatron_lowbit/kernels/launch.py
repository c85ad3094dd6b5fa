"""Quantization of a matrix and its transpose by one launch, or one for each amax more."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import AmaxSpec
from megatron_lowbit.kernels.amaxes import (
    AmaxPass,
    MatrixKind,
    amax_pass,
    amax_spec,
    kind_of,
    matrix_amax,
    scale_amaxes,
)
from megatron_lowbit.kernels.conditional import record_amax
from megatron_lowbit.kernels.hadamard import MAX_LANES
from megatron_lowbit.kernels.launcher import Launcher, tile_launcher
from megatron_lowbit.kernels.operands import ExactBF16
from megatron_lowbit.kernels.quantize import QuantizeSpec, SideArguments, quantize_kernel
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sides import (
    LANES,
    Layout,
    Written,
    allocator,
    arguments,
    draws_signs,
    layout_of,
)
from megatron_lowbit.numerics import DelayedAmax, QuantizedTensor, Request, ScaleAmaxes
from megatron_lowbit.numerics import quantize_both as reference
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tensor

_CURRENT_AMAX, TILES_DONE, TOKENS, _FIRST_SIDE = 5, 7, 8, 9
"""Indices of the kernel's arguments: amax of x, counts of tiles that have given their amaxes,
numbers of rows, first of the row side."""
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

    A format with a scale per row takes a pass of its own for the amaxes, as do folding and a format
    with a scale per tensor whose amax is not in ``amaxes``; one of earlier steps takes none where x
    itself is cast. The bits are the same as from :func:`megatron_lowbit.numerics.quantize_both`,
    in the form of each side.

    Raises:
        TypeError: x is neither FP32 nor BF16.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"quantization takes float32 or bfloat16, not {x.dtype}")
    # An amax of a side that is not wanted would be recorded.
    amaxes = row and amaxes[0], col and amaxes[1]
    if not x.numel():
        return reference(x, row, col, amaxes)
    keyless = row and row.keyless, col and col.keyless
    plan = _plan(kind_of(x), *keyless, *forms, row is col)
    if plan is None:
        # A tile that holds whole transforms in both directions would not fit into registers.
        by_row, _ = quantize_both(x, row, None, amaxes, forms)
        return by_row, quantize_both(x, None, col, amaxes, forms)[1]
    current_amax, known = None, amaxes
    if plan.casts and all(
        request is None or isinstance(amax, DelayedAmax)
        for request, amax in zip((row, col), amaxes, strict=True)
    ):
        known = [None if amax is None else amax.earlier for amax in amaxes]
        given = [amax for amax in known if amax is not None]
        current_amax = matrix_amax(x, (given[0], given[-1]))
    elif plan.amaxes is not None:
        known = scale_amaxes(x, row, col, amaxes, plan.amaxes)
    row_side, by_row = plan.row.outputs(row, known[0]) if plan.row else (NO_SIDE, None)
    col_side, by_col = plan.col.outputs(col, known[1]) if plan.col else (NO_SIDE, None)
    plan.launch((x, *x.stride(), *x.shape, current_amax, None, None, None, *row_side, *col_side))
    if current_amax is not None:
        record_amax(current_amax, amaxes, (by_row, by_col))
    return by_row, by_col


NO_SIDE = SideArguments()


class _SidePlan(NamedTuple):
    """Layout of a side, its allocator, and the amax that it is made from.

    ``varying`` are the indices of arguments whose type may differ between calls. ``casts``: the
    side casts x itself by a scale of the tensor.
    """

    layout: Layout
    allocate: Callable[[], tuple[QuantizedTensor | ExactBF16, Written]]
    amax: AmaxSpec | None
    varying: list[int]
    casts: bool

    def outputs(
        self, request: Request, amax: Any
    ) -> tuple[SideArguments, QuantizedTensor | ExactBF16]:
        """Allocate the operand; return the kernel's arguments for it, and the operand."""
        operand, written = self.allocate()
        amax = None if self.amax is None else amax
        return arguments(self.layout, written, request, amax), operand


class _Plan(NamedTuple):
    """Plan of both sides, the launcher, and the pass for amaxes that are not known.

    ``casts``: both sides cast.
    """

    row: _SidePlan | None
    col: _SidePlan | None
    launch: Launcher
    amaxes: AmaxPass | None
    casts: bool


@lru_cache(maxsize=4096)
def _plan(
    matrix: MatrixKind,
    row: Request | None,
    col: Request | None,
    row_form: Form,
    col_form: Form,
    same: bool,
) -> _Plan | None:
    """Plan the quantization of similar matrices; None for two passes.

    ``same``: both sides are of one request.
    """
    shape, device = matrix.shape, matrix.device
    transforms = [side.hadamard.size for side in (row, col) if side and side.hadamard]
    if row and col and max(transforms, default=1) > MAX_LANES.value:
        return None
    by_row = None if row is None else _side_plan(row, row_form, shape, device, False)
    by_col = None if col is None else _side_plan(col, col_form, shape[::-1], device, True)
    sides = [side for side in (by_row, by_col) if side is not None]
    casts = all(side.casts for side in sides)
    varying = [0, _CURRENT_AMAX] if casts else [0]
    for side in sides:
        varying += side.varying
    specs = by_row and by_row.layout.spec, by_col and by_col.layout.spec
    tile, options = tile_of(*specs)
    views = views_of(by_row and by_row.layout, by_col and by_col.layout)
    launch = tile_launcher(
        quantize_kernel, shape, tile, *specs, 0, varying=varying, views=views, **options
    )
    amaxes = by_row and by_row.amax, by_col and by_col.amax
    return _Plan(by_row, by_col, launch, amax_pass(matrix, *amaxes, same), casts)


def _side_plan(
    request: Request, form: Form, shape: tuple[int, int], device: torch.device, transposed: bool
) -> _SidePlan:
    layout, amax = layout_of(request, form, *shape, transposed), amax_spec(request, form)
    names = [] if amax is None else ["amax"]
    names += ["key", "rows", "groups"] if layout.spec.stochastic else []
    names += ["signs"] if draws_signs(layout.spec.transform) else []
    varying = [argument_index(name, transposed) for name in names]
    casts = isinstance(request.quantizer.format, FP8Tensor) and request.hadamard is None
    return _SidePlan(layout, allocator(layout, device), amax, varying, casts and form is Form.CODES)


def argument_index(name: str, is_col: bool) -> int:
    """Return the index of a side's argument among the kernel's."""
    fields = SideArguments._fields
    return _FIRST_SIDE + is_col * len(fields) + fields.index(name)


def views_of(row: Layout | None, col: Layout | None) -> dict[int, torch.dtype]:
    """Return the dtypes as which the kernel takes arguments, by their indices."""
    views = {_CURRENT_AMAX: torch.int32}
    for layout, is_col in ((row, False), (col, True)):
        if layout is not None:
            views |= {argument_index(name, is_col): dtype for name, dtype in layout.views.items()}
    return views


def tile_of(
    row: QuantizeSpec | None, col: QuantizeSpec | None
) -> tuple[tuple[int, int], dict[str, int]]:
    """Return rows and columns of the tile, and the launch's options.

    Measured on an H200; a tile for 128 lanes is the smallest that holds them.
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
    if lanes and any(side.from_numbers and side.block > LANES for side in sides):
        # Each number is divided, which takes registers.
        return (height, width), {"num_warps": height * width // 1024, "maxnreg": 128}
    if lanes:
        warps = 4 if longest > LANES else max(4, height * width // 2048)
        return (height, width), {"num_warps": warps, "maxnreg": _REGISTERS.get(longest, 80)}
    return (height, width), {"num_warps": max(8, height * width // 2048), "maxnreg": 128}
