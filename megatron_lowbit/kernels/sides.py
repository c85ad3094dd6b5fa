"""Sides of a quantization as a kernel takes them: constexprs of formats, outputs, arguments."""

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import NamedTuple

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
from megatron_lowbit.kernels.operands import NUMBERS, ExactBF16, element, has_tensor_scale
from megatron_lowbit.kernels.quantize import QuantizeSpec, SideArguments
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.scales import ScaleOptions
from megatron_lowbit.kernels.support import kernel_of
from megatron_lowbit.numerics import Hadamard, QuantizedTensor, Request, Rounding, derive_key
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.folding import fold_scale, folded_format, largest_after
from megatron_lowbit.numerics.hadamard import FIXED_SIGNS_16
from megatron_lowbit.numerics.randomness import GROUP

LANES = 32
"""Lanes of a group in longer blocks."""
Written = tuple[Tensor, Tensor | None, Tensor]
"""Codes, scales (None without any) and tensor scale, which a kernel writes."""


class Memory(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.dtype.itemsize


class Layout(NamedTuple):
    """Layout of the operand that a kernel writes for a side of a matrix, and its constexpr.

    ``format`` and ``shape`` are of the operand. ``columns`` is the length of a row of codes in
    elements: whole blocks and transforms. ``on_lanes``: four bytes of codes are written at once.
    ``scales`` are None for BF16 numbers. They are contiguous; scales of FP8 tiles of one row that
    are quantized on lanes have ``rows_fastest``, as cuBLAS reads them. ``tensor_scaled``: the
    tensor scale may not be 1.
    """

    spec: QuantizeSpec
    format: BlockFormat
    shape: tuple[int, int]
    columns: int
    codes: Memory
    scales: Memory | None
    on_lanes: bool
    rows_fastest: bool
    transposed: bool
    tensor_scaled: bool

    def operand(
        self, codes: Tensor, scales: Tensor | None, tensor_scale: Tensor
    ) -> QuantizedTensor | ExactBF16:
        """Return the operand in memory that was allocated so."""
        if scales is None:
            values = codes.t() if self.transposed else codes
            return ExactBF16(values, tensor_scale if self.tensor_scaled else None)
        scales = scales.t() if self.rows_fastest else scales
        return QuantizedTensor(codes, scales, tensor_scale, self.format, self.shape)

    @property
    def memory(self) -> list[Memory]:
        """Codes, and scales if there are any."""
        return [self.codes] if self.scales is None else [self.codes, self.scales]

    @property
    def views(self) -> dict[str, torch.dtype]:
        """The dtypes as which a kernel takes codes and scales, where those are not their own."""
        if self.scales is None:
            return {}
        views = {"codes": torch.int32 if self.on_lanes else torch.uint8}
        return views if self.scales.dtype.itemsize > 1 else views | {"scales": torch.uint8}


@lru_cache(maxsize=4096)
def layout_of(
    request: Request, form: Form, rows: int, columns: int, transposed: bool, lanes: bool = True
) -> Layout:
    """Return the layout of a side (rows, columns); ``transposed`` for a matrix's transpose.

    ``request`` has no keys. ``lanes``: False for a kernel that quantizes tiles as one tensor.
    """
    format = stored = request.quantizer.format
    if form is Form.FOLDED:
        stored = folded_format(format, request.left, request.partner)
    spec = _spec(request, form, stored)
    spec = spec if lanes else spec._replace(lanes=0)
    if request.hadamard is not None:
        columns = cdiv(columns, request.hadamard.size) * request.hadamard.size
    padded = columns if form is Form.BF16 else cdiv(columns, format.block) * format.block
    on_lanes = lanes and format.block > 1
    rows_fastest = on_lanes and not stored.repeats_scales and stored.block_rows == 1
    if form is Form.BF16:
        scales = None
        codes = Memory((columns, rows) if transposed else (rows, columns), torch.bfloat16)
    else:
        shape = tuple(stored.scale_shape(rows, padded))
        scales = Memory(shape[::-1] if rows_fastest else shape, stored.scale_dtype)
        width = padded // 2 if stored.element.bits == 4 else padded
        codes = Memory((rows, width), stored.element.dtype or torch.uint8)
    return Layout(
        spec, stored, (rows, columns), padded, codes, scales, on_lanes or spec.from_numbers,
        rows_fastest, transposed, has_tensor_scale(stored),
    )  # fmt: skip


def allocator(
    layout: Layout, device: torch.device
) -> Callable[[], tuple[QuantizedTensor | ExactBF16, Written]]:
    """Return a function that allocates the operand of a side, on the current device.

    What is the same in every operand is allocated once: scales of no elements, and the tensor scale
    of a format that has none, to which all kernels write 1.
    """
    new_codes = _allocation(layout.codes, device)
    new_scales = None if layout.scales is None else _allocation(layout.scales, device)
    has_scales = layout.scales is not None and layout.scales.numel > 0
    with torch.inference_mode(False):  # Autograd saves what all operands share, in training, too.
        no_scales = None if has_scales or new_scales is None else new_scales()
    scale_shape = (layout.shape[0], 1) if layout.format.scales_tensor_rows else ()
    new_tensor_scale = _allocation(Memory(scale_shape, torch.float32), device)
    unit = None if layout.tensor_scaled else _unit(device)

    def allocate() -> tuple[QuantizedTensor | ExactBF16, Written]:
        codes, scales = new_codes(), new_scales() if has_scales else no_scales
        tensor_scale = new_tensor_scale() if unit is None else unit
        written = codes, scales if has_scales else None, tensor_scale
        return layout.operand(codes, scales, tensor_scale), written

    return allocate


def _allocation(memory: Memory, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that allocates as torch's compiler does: in a third of torch.empty's time.

    It takes the current device of the type.
    """
    strides = torch.empty(memory.shape, device="meta").stride()
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if allocate is None:  # a device without memory
        return partial(torch.empty, memory.shape, dtype=memory.dtype, device=device)
    return partial(allocate, memory.shape, strides, memory.dtype)


@cache
@torch.inference_mode(False)
def _unit(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def arguments(
    layout: Layout, written: Written, request: Request, amax: Tensor | None
) -> SideArguments:
    """Return a kernel's arguments for a side.

    Raises:
        ValueError: a stochastic request has no draw.
    """
    key: int | Tensor = 0
    rows = groups = None
    if layout.spec.stochastic:
        draw = request.draw
        if draw is None:
            raise ValueError("stochastic rounding needs a Draw: which random bits to use")
        key = signed(draw.key)
        if draw.rows is not None or draw.groups is not None:
            rows, groups = draw.counters(*layout.shape, written[0].device)
            groups = F.pad(groups, (0, cdiv(layout.columns, GROUP) - len(groups)))
    signs = signs_of(request.hadamard, request.sign_key)
    return SideArguments(layout.columns, amax, *written, key, rows, groups, signs)


@cache
def _spec(request: Request, form: Form, stored: BlockFormat) -> QuantizeSpec:
    format, hadamard = request.quantizer.format, request.hadamard
    kernel = kernel_of(format)
    if kernel is None:
        raise ValueError(f"no kernel quantizes to {format}")
    module, _, name = kernel.scales.partition(":")
    options: tuple = kernel.options
    if kernel.scale_element is not None:
        options = ScaleOptions(element(kernel.scale_element), *options)
    block_lanes = min(format.block, NUMBERS if kernel.from_numbers else LANES)
    lanes = block_lanes if format.block > 1 else 0
    if hadamard is not None and lanes:
        fits = format.block <= LANES or (kernel.from_numbers and hadamard.size <= lanes)
        lanes = max(lanes, hadamard.size) if fits else 0
    return QuantizeSpec(
        scales=getattr(import_module(module), name),
        from_numbers=kernel.from_numbers,
        block_rows=format.block_rows,
        block=format.block,
        row_scaled=format.row_scaled,
        repeats_scales=format.repeats_scales,
        tensor_scaled=format.tensor_scaled,
        element=element(format.element),
        options=options,
        stochastic=request.quantizer.rounding is Rounding.STOCHASTIC,
        transform=transform_of(hadamard),
        lanes=lanes if lanes <= MAX_LANES.value else 0,
        block_lanes=block_lanes,
        values=form is Form.BF16,
        fold=element(stored.element) if form is Form.FOLDED else None,
        fold_scale=fold_scale(format, stored) if form is Form.FOLDED else 1.0,
        # A tensor scale is made from the amax after the transform.
        bound=1.0 if format.tensor_scaled else largest_after(hadamard),
    )


@cache
def transform_of(hadamard: Hadamard | None) -> Transform | None:
    """Return a transform as the kernels take it."""
    if hadamard is None:
        return None
    signs, minus = DRAWN_SIGNS.value, 0
    if hadamard.signs == "none":
        signs = NO_SIGNS.value
    elif hadamard.signs == "fixed" and hadamard.size == len(FIXED_SIGNS_16):
        signs = FIXED_SIGNS.value
        minus = sum(1 << i for i, sign in enumerate(FIXED_SIGNS_16) if sign < 0)
    factor = 1.0 / math.sqrt(hadamard.size)
    return Transform(hadamard.size, signs, minus, factor, int(hadamard.output == "bf16"))


def draws_signs(transform: Transform | None) -> bool:
    """Return True if a kernel draws the signs of a transform, from a key."""
    return transform is not None and transform.signs == DRAWN_SIGNS.value


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
