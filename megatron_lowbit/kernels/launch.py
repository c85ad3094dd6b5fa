"""Launches the quantization kernels: formats and options as their constexprs, outputs allocated."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.kernels.amax import MAX_POINTS, amax_kernel
from megatron_lowbit.kernels.delayed import own_amax, settle
from megatron_lowbit.kernels.forms import Form
from megatron_lowbit.kernels.hadamard import DRAWN_SIGNS, FIXED_SIGNS, NO_SIGNS, Transform
from megatron_lowbit.kernels.operands import Values, cdiv, element, has_tensor_scale
from megatron_lowbit.kernels.quantize import Side, quantize_kernel
from megatron_lowbit.kernels.row_amax import row_amax_kernel
from megatron_lowbit.kernels.scales import NVFP4Options
from megatron_lowbit.numerics import (
    Amaxes,
    DelayedAmax,
    Hadamard,
    QuantizedTensor,
    Quantizer,
    Request,
    Rounding,
    ScaleAmaxes,
    derive_key,
)
from megatron_lowbit.numerics import quantize_both as reference
from megatron_lowbit.numerics import tensor_amaxes as reference_amaxes
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tensor
from megatron_lowbit.numerics.block_formats.nvfp4 import NVFP4
from megatron_lowbit.numerics.folding import folded_format, largest_after, lift
from megatron_lowbit.numerics.formats import E4M3
from megatron_lowbit.numerics.hadamard import FIXED_SIGNS_16
from megatron_lowbit.numerics.randomness import GROUP, Draw

_LARGEST_TRANSFORM = 128
"""Points of the largest transform that a tile holds in both directions."""
_GROUP = 32
"""Points of a group in longer blocks."""
_NOTHING = (0, None, None, None, None, 0, None, None, 0)
"""A kernel's arguments for a side that is not wanted."""


def quantize_both(
    x: Tensor,
    row: Request | None,
    col: Request | None,
    amaxes: ScaleAmaxes = (None, None),
    forms: tuple[Form, Form] = (Form.CODES, Form.CODES),
) -> tuple[QuantizedTensor | Values | None, QuantizedTensor | Values | None]:
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
    if row and col and max(_points(row), _points(col)) > _LARGEST_TRANSFORM:
        # A tile that holds whole transforms in both directions would not fit into registers.
        by_row, _ = quantize_both(x, row, None, amaxes, forms)
        return by_row, quantize_both(x, None, col, amaxes, forms)[1]
    own = None
    if all(map(_casts_delayed, (row, col), amaxes, forms)):
        known = [None if amax is None else amax.earlier for amax in amaxes]
        own = own_amax(x, known)
    else:
        known = _all_amaxes(x, row, col, _resolved(x, row, col, amaxes), forms)
    row_arguments, row_side, by_row = outputs(row, x, known[0], False, forms[0])
    col_arguments, col_side, by_col = outputs(col, x.t(), known[1], True, forms[1])
    tile, options = _tile(row_side, col_side)
    quantize_kernel[_grid(x, tile)](
        x, *x.stride(), *x.shape, own, *row_arguments, *col_arguments,
        *tile, row_side, col_side, _is_even(x, tile), enable_fp_fusion=False, **options,
    )  # fmt: skip
    if own is not None:
        settle(own, amaxes, (by_row, by_col))
    return by_row, by_col


def _casts_delayed(request: Request | None, amax: Tensor | DelayedAmax | None, form: Form) -> bool:
    """Return True for a side that is not wanted, or that casts x itself by an earlier amax."""
    if request is None:
        return True
    casts = isinstance(request.quantizer.format, FP8Tensor) and request.hadamard is None
    return casts and form is Form.CODES and isinstance(amax, DelayedAmax)


def _resolved(x: Tensor, row: Request | None, col: Request | None, amaxes: ScaleAmaxes) -> Amaxes:
    """Return the amaxes of scales, those of earlier steps resolved by a pass over x."""
    if not any(isinstance(amax, DelayedAmax) for amax in amaxes):
        return amaxes
    by_row, by_col = (
        amax.resolve(own) if isinstance(amax, DelayedAmax) else amax
        for amax, own in zip(amaxes, _tensor_amaxes(x, row, col), strict=True)
    )
    return by_row, by_col


def _all_amaxes(
    x: Tensor, row: Request | None, col: Request | None, amaxes: Amaxes, forms: tuple[Form, Form]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes of tensors and of rows that scales and folding are made from."""
    missing = [
        _measured(request, form) if request is not None and amax is None else None
        for request, amax, form in zip((row, col), amaxes, forms, strict=True)
    ]
    own, rows = _tensor_amaxes(x, *missing), _row_amaxes(x, row, col)
    found = []
    for request, amax, mine, of_rows in zip((row, col), amaxes, own, rows, strict=True):
        if mine is not None and request.hadamard and not request.quantizer.format.tensor_scaled:
            mine = mine * largest_after(request.hadamard)
        found.append(next((one for one in (amax, mine, of_rows) if one is not None), None))
    return found[0], found[1]


def _measured(request: Request, form: Form) -> Request | None:
    """Return the request whose tensor amax is needed: for folding, before a transform."""
    if request.quantizer.format.tensor_scaled:
        return request
    return replace(request, hadamard=None) if form is Form.FOLDED else None


def tensor_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Compute what :func:`megatron_lowbit.numerics.tensor_amaxes` does, in one pass over x."""
    if not x.numel():
        return reference_amaxes(x, row, col)
    return _tensor_amaxes(
        x, *(r if r and r.quantizer.format.tensor_scaled else None for r in (row, col))
    )


def _tensor_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Compute the amaxes of both sides, whatever their formats; None for None."""
    if row is None and col is None:
        return None, None
    plain = all(r is None or r.hadamard is None for r in (row, col))
    if row and col and (col is row or plain):
        amax, _ = _tensor_amaxes(x, row, None)
        return amax, amax
    by_row, by_col = _amaxes(amax_kernel, x, row, col, (1, 1), 4)
    return None if by_row is None else by_row.view(()), None if by_col is None else by_col.view(())


def _row_amaxes(x: Tensor, row: Request | None, col: Request | None) -> list[Tensor | None]:
    """Return the amaxes of each side's rows, FP32 (R,); None for a format without a scale a row.

    A row of the transpose is a column of x: all of its tokens, where wgrad contracts them.
    """
    scaled = [r if r and r.quantizer.format.row_scaled else None for r in (row, col)]
    if not any(scaled):
        return [None, None]
    return _amaxes(row_amax_kernel, x, *scaled, x.shape, 8)


def _amaxes(
    kernel: Any, x: Tensor, row: Request | None, col: Request | None, sizes: Sequence[int],
    warps: int,
) -> list[Tensor | None]:  # fmt: skip
    """Launch a kernel of amaxes, of so many for each side; return FP32, None for None."""
    sides = (row, col)
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device).split(list(sizes))
    found = [bits if r else None for bits, r in zip(zeros, sides, strict=True)]
    signs = [_signs(r.hadamard, r.sign_key) if r else 0 for r in sides]
    transforms = [_transform(r.hadamard) if r else None for r in sides]
    tile = _amax_tile(row, col)
    kernel[_grid(x, tile)](
        x, *x.stride(), *x.shape, found[0], signs[0], found[1], signs[1],
        *tile, *transforms, _is_even(x, tile), num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return [None if bits is None else bits.view(torch.float32) for bits in found]


def _points(request: Request | None) -> int:
    return request.hadamard.size if request and request.hadamard else 1


def _amax_tile(row: Request | None, col: Request | None) -> tuple[int, int]:
    """Return rows and columns of a tile that holds whole transforms of both sides."""
    across, down = _points(row), _points(col)
    if max(across, down) > _LARGEST_TRANSFORM:
        return (max(32, down), max(32, across))
    return (max(64, down), max(128, across))


def outputs(
    request: Request | None,
    x: Tensor,
    amax: Tensor | None,
    transposed: bool,
    form: Form,
    out: QuantizedTensor | None = None,
    points: bool = True,
) -> tuple[tuple, Side | None, QuantizedTensor | Values | None]:
    """Return one side's kernel arguments, its constexpr, and the operand that it fills.

    ``out``: codes to fill, which are new where None. ``points``: False for a kernel that quantizes
    tiles as one tensor.
    """
    if request is None:
        return _NOTHING, None, None
    format, hadamard, draw = request.quantizer.format, request.hadamard, request.draw
    rows, columns = x.shape
    if hadamard is not None:
        columns = _round_up(columns, hadamard.size)
    padded = _round_up(columns, format.block)
    stored = format
    if form is Form.FOLDED:
        stored = folded_format(format, request.left, request.partner)
    side = _side(request.quantizer, hadamard, form, stored)
    side = side if points else side._replace(points=0)
    tensor_scale = torch.empty((), dtype=torch.float32, device=x.device)
    if form is Form.VALUES:
        shape = (columns, rows) if transposed else (rows, columns)
        codes = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
        scale = tensor_scale if has_tensor_scale(format) else None
        made = Values(codes.t() if transposed else codes, scale)
        pointers = (columns, amax, codes, None, tensor_scale)
    else:
        made = out or _codes(stored, rows, columns, padded, tensor_scale, side.points > 0)
        codes = made.codes.view(torch.uint8)
        scales = made.scales if made.scales.numel() else None
        if scales is not None and scales.element_size() == 1:
            scales = scales.view(torch.uint8)
        pointers = (padded, amax, codes.view(torch.int32) if side.points else codes, scales,
                    made.tensor_scale)  # fmt: skip
    key, numbers = 0, (None, None)
    if side.stochastic:
        if draw is None:
            raise ValueError("stochastic rounding needs a Draw: which random bits to use")
        key, numbers = draw.key, _numbers(draw, rows, columns, padded, x.device)
    arguments = (*pointers, _signed(key), *numbers, _signs(hadamard, request.sign_key))
    return arguments, side, made


def _codes(
    format: BlockFormat, rows: int, columns: int, padded: int, tensor_scale: Tensor, points: bool
) -> QuantizedTensor:
    """Allocate a quantized tensor (rows, columns).

    Its scales are contiguous, but those of FP8 tiles of one row that are quantized on ``points``
    have rows fastest, as cuBLAS reads them.
    """
    new = partial(torch.empty, device=tensor_scale.device)
    codes = new((rows, padded // 2 if format.element.bits == 4 else padded), dtype=torch.uint8)
    shape, dtype = format.scale_shape(rows, padded), format.scale_dtype
    codes = codes.view(format.element.dtype or torch.uint8)
    if points and not format.repeats_scales and format.block_rows == 1:
        scales = new(shape[::-1], dtype=dtype).t()
    else:
        scales = new(shape, dtype=dtype)
    return QuantizedTensor(codes, scales, tensor_scale, format, (rows, columns))


@cache
def _side(quantizer: Quantizer, hadamard: Hadamard | None, form: Form, stored: BlockFormat) -> Side:
    format = quantizer.format
    function, options = _scale_function(format)
    points = min(format.block, _GROUP) if format.block > 1 else 0
    if hadamard is not None and points:
        points = max(points, hadamard.size) if format.block <= _GROUP else 0
    return Side(
        scales=function,
        block_rows=format.block_rows,
        block=format.block,
        row_scaled=format.row_scaled,
        repeats_scales=format.repeats_scales,
        tensor_scaled=format.tensor_scaled,
        element=element(format.element),
        options=options,
        stochastic=quantizer.rounding is Rounding.STOCHASTIC,
        transform=_transform(hadamard),
        points=points if points <= MAX_POINTS.value else 0,
        values=form is Form.VALUES,
        fold=element(stored.element) if form is Form.FOLDED else None,
        lift=lift(format, stored) if form is Form.FOLDED else 1.0,
    )


def _scale_function(format: BlockFormat) -> tuple[Callable, Any]:
    """Return the Triton function of a format's scales, and its options."""
    module, _, name = (format.scale_kernel or "").partition(":")
    options = format.kernel_options
    if isinstance(format, NVFP4):
        options = NVFP4Options(element(E4M3), *options)
    return getattr(import_module(module), name), options


@cache
def _transform(hadamard: Hadamard | None) -> Transform | None:
    if hadamard is None:
        return None
    kind, minus = DRAWN_SIGNS.value, 0
    if hadamard.signs == "none":
        kind = NO_SIGNS.value
    elif _has_known_signs(hadamard):
        kind = FIXED_SIGNS.value
        minus = sum(1 << i for i, sign in enumerate(FIXED_SIGNS_16) if sign < 0)
    factor = 1.0 / math.sqrt(hadamard.size)
    return Transform(hadamard.size, kind, minus, factor, int(hadamard.output == "bf16"))


def _has_known_signs(hadamard: Hadamard) -> bool:
    return hadamard.signs == "fixed" and hadamard.size == len(FIXED_SIGNS_16)


def _signs(hadamard: Hadamard | None, sign_key: int | Tensor) -> int | Tensor:
    """Return the key that ``Hadamard.sign_vector`` draws from, if it draws."""
    if hadamard is None or hadamard.signs in ("none", "fixed"):
        return 0
    return _signed(sign_key if hadamard.signs == "fresh" else derive_key(hadamard.signs))


def _numbers(
    draw: Draw, rows: int, columns: int, padded: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return global row and group numbers, None where they count from zero."""
    if draw.rows is None and draw.groups is None:
        return None, None
    all_rows, all_groups = draw.counters(rows, columns, device)
    return all_rows, F.pad(all_groups, (0, cdiv(padded, GROUP) - len(all_groups)))


def _tile(row: Side | None, col: Side | None) -> tuple[tuple[int, int], dict[str, int]]:
    """Return rows and columns of the tile, and the launch's options: found by trying on an H200."""
    sides = [side for side in (row, col) if side is not None]
    height, width = 32 if col is None else 64, 128
    if any(side.transform and side.transform.points > _LARGEST_TRANSFORM for side in sides):
        height = width = 32
    points = all(side.points for side in sides)
    if points and all(side.block <= _GROUP for side in sides):
        if any(side.points == 64 for side in sides):
            return (64, 128), {"num_warps": 4, "maxnreg": 168}
        # Fewer values a thread, so that more threads hide each other's waiting.
        if any(side.stochastic for side in sides):
            return (32, 128), {"num_warps": 4}
        waits = any(side.transform or side.block_rows > 1 for side in sides)
        return (height, 64 if waits else 128), {"num_warps": 4}
    for side, is_col in ((row, False), (col, True)):
        if side is not None:
            along = max(side.block, side.transform.points if side.transform else 0, side.points)
            height = max(height, along if is_col else side.block_rows)
            width = max(width, side.block_rows if is_col else along)
    if points:
        return (height, width), {"num_warps": max(4, height * width // 2048), "maxnreg": 80}
    return (height, width), {"num_warps": max(8, height * width // 2048), "maxnreg": 128}


def _signed(key: int | Tensor) -> int | Tensor:
    """Return 64 bits as a signed number, which kernels take; or a key in device memory."""
    if isinstance(key, Tensor):
        return key
    key %= 2**64
    return key - 2**64 if key >= 2**63 else key


def _round_up(size: int, multiple: int) -> int:
    return cdiv(size, multiple) * multiple


def _grid(x: Tensor, tile: tuple[int, int]) -> tuple[int]:
    return (cdiv(x.shape[0], tile[0]) * cdiv(x.shape[1], tile[1]),)


def _is_even(x: Tensor, tile: tuple[int, int]) -> bool:
    return x.shape[0] % tile[0] == 0 and x.shape[1] % tile[1] == 0
