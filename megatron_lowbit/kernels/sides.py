"""Sides of a quantization as a kernel takes them: constexprs of formats, outputs, arguments."""

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.kernels.hadamard import (
    DRAWN_SIGNS,
    FIXED_SIGNS,
    MAX_LANES,
    NO_SIGNS,
    Transform,
)
from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.operands import ExactBF16, element, has_tensor_scale
from megatron_lowbit.kernels.quantize import QuantizeSpec
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.scales import ScaleOptions
from megatron_lowbit.numerics import (
    Hadamard,
    QuantizedTensor,
    Request,
    Rounding,
    derive_key,
)
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.folding import fold_scale, folded_format, largest_after
from megatron_lowbit.numerics.hadamard import FIXED_SIGNS_16
from megatron_lowbit.numerics.randomness import GROUP

LANES = 32
"""Lanes of a group in longer blocks."""
NO_SIDE = (0, None, None, None, None, 0, None, None, 0)
"""A kernel's arguments for a side that is not wanted."""


class Layout(NamedTuple):
    """Layout of what a kernel writes of one side of a matrix, and the constexpr that it takes.

    ``columns`` are those of a row of codes, in elements: whole blocks and transforms. ``stored`` is
    the format of the result, of size ``shape``.
    """

    side: QuantizeSpec
    stored: BlockFormat
    shape: tuple[int, int]
    columns: int
    code_shape: tuple[int, int]
    scale_shape: tuple[int, ...]
    transposed: bool


@lru_cache(maxsize=4096)
def layout_of(
    kind: Request,
    form: Form,
    rows: int,
    columns: int,
    transposed: bool,
    lanes: bool = True,
) -> Layout:
    """Return the layout of a side (rows, columns); ``transposed`` for a matrix's transpose.

    ``kind`` is a request's. ``lanes``: False for a kernel that quantizes tiles as one tensor.
    """
    format = stored = kind.quantizer.format
    if form is Form.FOLDED:
        stored = folded_format(format, kind.left, kind.partner)
    side = _side(kind, form, stored)
    side = side if lanes else side._replace(lanes=0)
    if kind.hadamard is not None:
        columns = cdiv(columns, kind.hadamard.size) * kind.hadamard.size
    padded = cdiv(columns, format.block) * format.block
    if form is Form.BF16:
        code_shape = (columns, rows) if transposed else (rows, columns)
        return Layout(side, stored, (rows, columns), columns, code_shape, (), transposed)
    code_shape = (rows, padded // 2 if stored.element.bits == 4 else padded)
    scale_shape = tuple(stored.scale_shape(rows, padded))
    return Layout(side, stored, (rows, columns), padded, code_shape, scale_shape, transposed)


class Output(NamedTuple):
    """The operand that a kernel fills, and its codes, scales (None without any), tensor scale."""

    operand: QuantizedTensor | ExactBF16
    codes: Tensor
    scales: Tensor | None
    tensor_scale: Tensor


class Memory(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def memory_of(layout: Layout) -> tuple[Memory, Memory | None]:
    """Return the memory of the codes and of the scales that a kernel writes for a side.

    Scales are contiguous, but those of FP8 tiles of one row that are quantized on lanes have rows
    fastest, as cuBLAS reads them.
    """
    side, format = layout.side, layout.stored
    if side.values:
        return Memory(layout.code_shape, torch.bfloat16), None
    shape = layout.scale_shape[::-1] if _has_rows_fastest(layout) else layout.scale_shape
    codes = Memory(layout.code_shape, format.element.dtype or torch.uint8)
    return codes, Memory(shape, format.scale_dtype)


def taken_as(layout: Layout) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes as which a kernel takes codes and scales; None for their own.

    It writes four bytes of codes at once where it quantizes on lanes.
    """
    _, scales = memory_of(layout)
    if scales is None:
        return None, None
    is_byte = scales.dtype.itemsize == 1
    return torch.int32 if layout.side.lanes else torch.uint8, torch.uint8 if is_byte else None


def allocator(layout: Layout, device: torch.device) -> Callable[[], Output]:
    """Return a function that allocates the outputs of a side, on the current device.

    What is the same in every operand is allocated once: scales of no elements, and the tensor scale
    of a format that has none, to which all kernels write 1.
    """
    codes, scales = memory_of(layout)
    new_codes, new_scales = _allocation(codes, device), lambda: None
    if scales is not None:
        new_scales = _allocation(scales, device)
        if not math.prod(scales.shape):
            new_scales = partial(_same, new_scales())
    new_tensor_scale = _allocation(Memory((), torch.float32), device)
    if not has_tensor_scale(layout.stored):
        new_tensor_scale = partial(_same, _unit(device))
    new_output = output_of(layout)
    return lambda: new_output(new_codes(), new_scales(), new_tensor_scale())


def _allocation(memory: Memory, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that allocates as torch's compiler does: in a third of torch.empty's time.

    It takes the current device of the type.
    """
    strides = torch.empty(memory.shape, device="meta").stride()
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if allocate is None:  # a device without memory
        return partial(torch.empty, memory.shape, dtype=memory.dtype, device=device)
    return partial(allocate, memory.shape, strides, memory.dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@cache
def _unit(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def output_of(layout: Layout) -> Callable[[Tensor, Tensor | None, Tensor], Output]:
    """Return a function that returns the operand in memory of codes, scales and tensor scale."""
    format, shape, transposed = layout.stored, layout.shape, layout.transposed
    if layout.side.values:
        scaled = has_tensor_scale(format)

        def exact(codes: Tensor, scales: Tensor | None, tensor_scale: Tensor) -> Output:
            operand = ExactBF16(
                codes.t() if transposed else codes, tensor_scale if scaled else None
            )
            return Output(operand, codes, None, tensor_scale)

        return exact
    rows_fastest, has_scales = _has_rows_fastest(layout), math.prod(layout.scale_shape) > 0

    def quantized(codes: Tensor, scales: Tensor | None, tensor_scale: Tensor) -> Output:
        stored = scales.t() if rows_fastest else scales
        operand = QuantizedTensor(codes, stored, tensor_scale, format, shape)
        return Output(operand, codes, scales if has_scales else None, tensor_scale)

    return quantized


def _has_rows_fastest(layout: Layout) -> bool:
    format = layout.stored
    return bool(layout.side.lanes) and not format.repeats_scales and format.block_rows == 1


def filled(out: QuantizedTensor) -> Output:
    """Return codes that are there already as the output of a side."""
    return Output(out, out.codes, out.scales if out.scales.numel() else None, out.tensor_scale)


def arguments(layout: Layout, output: Output, request: Request, amax: Tensor | None) -> tuple:
    """Return a kernel's arguments for a side, in the order of :data:`NO_SIDE`."""
    key, numbers = 0, (None, None)
    if layout.side.stochastic:
        key, numbers = key_of(request), numbers_of(request, layout, output.codes.device)
    return (
        layout.columns, amax, output.codes, output.scales, output.tensor_scale, key,
        *numbers, signs_of(request.hadamard, request.sign_key),
    )  # fmt: skip


def key_of(request: Request) -> int | Tensor:
    """Return the key of a stochastic request's draws, as a kernel takes it."""
    if request.draw is None:
        raise ValueError("stochastic rounding needs a Draw: which random bits to use")
    return signed(request.draw.key)


@cache
def _side(kind: Request, form: Form, stored: BlockFormat) -> QuantizeSpec:
    format, hadamard = kind.quantizer.format, kind.hadamard
    function, options = _scale_function(format)
    lanes = min(format.block, LANES) if format.block > 1 else 0
    if hadamard is not None and lanes:
        lanes = max(lanes, hadamard.size) if format.block <= LANES else 0
    return QuantizeSpec(
        scales=function,
        from_numbers=format.scales_from_numbers,
        block_rows=format.block_rows,
        block=format.block,
        row_scaled=format.row_scaled,
        repeats_scales=format.repeats_scales,
        tensor_scaled=format.tensor_scaled,
        element=element(format.element),
        options=options,
        stochastic=kind.quantizer.rounding is Rounding.STOCHASTIC,
        transform=transform_of(hadamard),
        lanes=lanes if lanes <= MAX_LANES.value else 0,
        values=form is Form.BF16,
        fold=element(stored.element) if form is Form.FOLDED else None,
        fold_scale=fold_scale(format, stored) if form is Form.FOLDED else 1.0,
        # A tensor scale is from the amax after the transform.
        bound=1.0 if format.tensor_scaled else largest_after(hadamard),
    )


def _scale_function(format: BlockFormat) -> tuple[Callable, Any]:
    """Return the Triton function of a format's scales, and its options."""
    module, _, name = (format.scale_kernel or "").partition(":")
    options = format.kernel_options
    if format.scale_element is not None:
        options = ScaleOptions(element(format.scale_element), *options)
    return getattr(import_module(module), name), options


@cache
def transform_of(hadamard: Hadamard | None) -> Transform | None:
    """Return a transform as the kernels take it."""
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


def draws_signs(transform: Transform | None) -> bool:
    """Return True if a kernel draws the signs of a transform, from a key."""
    return transform is not None and transform.signs == DRAWN_SIGNS.value


def _has_known_signs(hadamard: Hadamard) -> bool:
    return hadamard.signs == "fixed" and hadamard.size == len(FIXED_SIGNS_16)


def signs_of(hadamard: Hadamard | None, sign_key: int | Tensor) -> int | Tensor:
    """Return the key that ``Hadamard.sign_vector`` draws from, if it draws."""
    if hadamard is None or hadamard.signs in ("none", "fixed"):
        return 0
    return signed(sign_key if hadamard.signs == "fresh" else derive_key(hadamard.signs))


def signed(key: int | Tensor) -> int | Tensor:
    """Return 64 bits as a signed number, which kernels take; or a key in device memory."""
    if isinstance(key, Tensor):
        return key
    key %= 2**64
    return key - 2**64 if key >= 2**63 else key


def numbers_of(
    request: Request, layout: Layout, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return global row and group numbers, None where they count from zero."""
    draw, (rows, columns) = request.draw, layout.shape
    if draw.rows is None and draw.groups is None:
        return None, None
    all_rows, all_groups = draw.counters(rows, columns, device)
    return all_rows, F.pad(all_groups, (0, cdiv(layout.columns, GROUP) - len(all_groups)))
