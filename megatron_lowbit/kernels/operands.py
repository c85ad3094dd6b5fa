"""Operands of a GEMM on a GPU: codes, exact BF16 numbers, or codes folded into FP8."""

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.elements import (
    Element,
    bf16_values,
    code_values,
    encode,
    over_block,
    round_nearest,
)
from megatron_lowbit.kernels.engine import Transposed
from megatron_lowbit.kernels.launcher import Launcher, cdiv
from megatron_lowbit.kernels.sections import FIRST_TILE, ROWS, X, entry, pointer, section_of
from megatron_lowbit.kernels.support import kernel_of
from megatron_lowbit.kernels.tiles import load_raw, store_tile
from megatron_lowbit.numerics import QuantizedTensor
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tile
from megatron_lowbit.numerics.block_formats.tetrajet2 import split_scales
from megatron_lowbit.numerics.folding import fold_scale
from megatron_lowbit.numerics.formats import ElementFormat

COLUMNS, SCALES, VALUES = (tl.constexpr(i) for i in range(3, 6))
DECODE_FIELDS = tl.constexpr(6)
"""Rows of the table of operands to decode, after their codes' addresses and rows; their number."""
NUMBERS = 16
"""Numbers that the functions of ``block_codes.py`` quantize, with a scale of their own."""
DECODED_TILE = 16, 256
"""Rows and columns that a program decodes."""


@dataclass(frozen=True)
class ExactBF16:
    """An operand as BF16 numbers (R, K), any strides: times ``tensor_scale`` they are exact.

    ``tensor_scale`` is an FP32 scalar, (R, 1) for each row, or None for 1. ``mean``, FP32, is what
    was split off: (1, K) is added to each row, (R, 1) to each column of the transpose.
    """

    values: Tensor
    tensor_scale: Tensor | None
    mean: Tensor | None = None

    def t(self) -> "ExactBF16":
        """Return the transpose, in the same memory."""
        mean = None if self.mean is None else self.mean.t()
        return ExactBF16(self.values.t(), self.tensor_scale, mean)

    @property
    def row_scales(self) -> Tensor | None:
        """The tensor scales of rows, (R, 1)."""
        scale = self.tensor_scale
        return scale if scale is not None and scale.ndim else None

    def dequantize(self) -> Tensor:
        """Return the FP32 values."""
        values = self.values.float()
        values = values if self.tensor_scale is None else values * self.tensor_scale
        return values if self.mean is None else values + self.mean


GpuOperand = Tensor | QuantizedTensor | ExactBF16 | Transposed
"""Operand of a GEMM on a GPU."""


def transposed(operand: QuantizedTensor | ExactBF16) -> Transposed | ExactBF16:
    """Return the transpose of an operand in square blocks, in the same memory."""
    return operand.t() if isinstance(operand, ExactBF16) else Transposed(operand)


def is_exact(operand: GpuOperand) -> bool:
    """Return True for BF16 numbers, and for codes that :func:`exact_values` decodes exactly."""
    if isinstance(operand, Tensor):
        return operand.dtype is torch.bfloat16
    return isinstance(operand, ExactBF16) or operand.format.exact_in_bf16


def exact_values(operand: QuantizedTensor | Transposed | ExactBF16) -> ExactBF16:
    """Decode codes and scales of at most 4 significant bits each to BF16 numbers."""
    if isinstance(operand, ExactBF16):
        return operand
    if isinstance(operand, Transposed):
        return exact_values(operand.of).t()
    if operand.scales.shape[1]:
        values = _decoded(operand, None)
    else:
        values = operand.codes.to(torch.bfloat16)[:, : operand.shape[-1]]
    scale = operand.tensor_scale if has_tensor_scale(operand.format) else None
    mean = None if operand.mean is None else operand.mean[None]
    return ExactBF16(values, scale, mean)


def scaled_blocks(operand: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Decode codes times scales of 16 to BF16 (R, K); return also the FP32 scales of 128 of them.

    K is padded to whole blocks. The products are exact.
    """
    outer, inner = split_scales(operand.scales)
    values = torch.empty(_shape(operand), dtype=torch.bfloat16, device=operand.codes.device)
    launch = _launcher(*values.shape, operand.format, None, values.device)
    launch((operand.codes, inner.view(torch.uint8), values, None, None, None, None,
            *values.shape, None))  # fmt: skip
    return values, outer.squeeze(-1)


def rounded_values(operand: QuantizedTensor) -> Tensor:
    """Decode what :func:`exact_values` takes, with block scales, and round it to BF16 (R, K)."""
    scaled = has_tensor_scale(operand.format)
    return _decoded(operand, operand.tensor_scale if scaled else None)


def _decoded(operand: QuantizedTensor, tensor_scale: Tensor | None) -> Tensor:
    """Decode codes times block scales, and a tensor scale if one is given, to BF16 (R, K)."""
    if kernel_of(operand.format) is None:
        scale = torch.ones_like(operand.tensor_scale) if tensor_scale is None else tensor_scale
        return replace(operand, tensor_scale=scale, mean=None).dequantize().to(torch.bfloat16)
    values = torch.empty(_shape(operand), dtype=torch.bfloat16, device=operand.codes.device)
    if values.numel():
        launch = _launcher(*values.shape, operand.format, None, values.device)
        launch((operand.codes, _scale_bytes(operand), values, None, tensor_scale, None, None,
                *values.shape, None))  # fmt: skip
    return values[:, : operand.shape[-1]]


def fold(
    operand: QuantizedTensor, target: BlockFormat, inexact: Tensor | None = None
) -> QuantizedTensor:
    """Fold codes with their block scales to ``target``, with the bits of ``numerics/folding.py``.

    The number of values that are rounded is added to ``inexact``, int64 ().
    """
    codes = torch.empty(_shape(operand), dtype=target.element.dtype, device=operand.codes.device)
    tensor_scale = torch.empty((), device=codes.device)
    if codes.numel():
        scales = _scale_bytes(operand)
        largest = None if operand.format.tensor_scaled else _largest_exponent(operand, scales)
        launch = _launcher(*codes.shape, operand.format, target, codes.device)
        launch((operand.codes, scales, codes, largest, operand.tensor_scale, tensor_scale, inexact,
                *codes.shape, None))  # fmt: skip
    scales = tensor_scale.new_empty((codes.shape[0], 0))
    return QuantizedTensor(codes, scales, tensor_scale, target, operand.shape)


def _largest_exponent(operand: QuantizedTensor, exponents: Tensor) -> Tensor:
    """Return the largest E8M0 byte of a block that is not zero, uint8 ()."""
    if not isinstance(operand.format, FP8Tile):
        return exponents.amax()
    # Tiles of zeros have the scale 1.
    magnitudes = operand.codes.view(torch.uint8) & 0x7F
    nonzero = magnitudes.unflatten(1, (-1, operand.format.block)).amax(-1) > 0
    largest = torch.where(nonzero, exponents, 0).amax()
    return torch.where(largest == 0, exponents.amax(), largest)


def has_tensor_scale(format: BlockFormat) -> bool:
    """Return True if the tensor scale may be another than 1."""
    scaled = format.tensor_scaled or format.scales_tensor_rows
    return scaled or "three_quarters" in format.options


def _shape(operand: QuantizedTensor) -> tuple[int, int]:
    """Return the rows and columns of the codes."""
    rows, columns = operand.codes.shape
    return rows, columns * (2 if operand.format.element.bits == 4 else 1)


@lru_cache(maxsize=4096)
def _launcher(
    rows: int, columns: int, format: BlockFormat, target: BlockFormat | None, device: torch.device
) -> Launcher:
    folded, log2_scale, views = None, 0, {0: torch.uint8}
    if target is not None:
        folded, log2_scale = element(target.element), int(math.log2(fold_scale(format, target)))
        views[2] = torch.uint8
    even = rows % DECODED_TILE[0] == 0 and columns % DECODED_TILE[1] == 0
    constants = (*DECODED_TILE, *elements_of(format), folded, log2_scale, even, 0)
    programs = decoding_programs(rows, columns)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return Launcher(decode_kernel, programs, constants, (0, 1, 3, 4, 5, 6), views, **options)


def decoding_programs(rows: Any, columns: Any) -> Any:
    """Return the number of tiles in which codes (rows, columns) are decoded; of many as many."""
    return cdiv(rows, DECODED_TILE[0]) * cdiv(columns, DECODED_TILE[1])


def elements_of(format: BlockFormat) -> tuple[int, Element, Element | None, bool]:
    """Return a format's block, elements, scales' elements, and ``multiplies_scales``."""
    kernel = kernel_of(format)
    if kernel is None:
        raise ValueError(f"no kernel decodes {format}")
    scale = None if kernel.scale_element is None else element(kernel.scale_element)
    block = NUMBERS if kernel.from_numbers else format.block
    return block, element(format.element), scale, kernel.multiplies_scales


def _scale_bytes(operand: QuantizedTensor) -> Tensor:
    """Return a byte for each row of codes and block; power-of-two scales of FP8 tiles as E8M0."""
    if not isinstance(operand.format, FP8Tile):
        # The reference's of a single row of square blocks have a row's stride of 0.
        return operand.scales.contiguous().view(torch.uint8)
    bytes_ = (operand.scales.view(torch.int32) >> 23).to(torch.uint8)
    by_row = bytes_.repeat_interleave(operand.format.block_rows, dim=0)
    return by_row[: operand.codes.shape[0]].contiguous()


@cache
def element(format: ElementFormat) -> Element:
    """Return an element format as the kernels take it."""
    smallest = torch.tensor(format.min_normal).view(torch.int32).item() >> 23
    # Formats of 4 and 6 bits have no NaN; in the others it is the last code.
    nan_code = (1 << (format.bits - 1)) - 1 if format.bits >= 8 else 0
    return Element(
        format.bits, format.random_bits, format.mantissa_bits, smallest, format.max, nan_code
    )


@triton.jit
def decode_kernel(
    codes, scales, out, largest, tensor_scale, out_scale, inexact, R, K, table,
    TM: tl.constexpr, TN: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr, SCALE: tl.constexpr,
    MULTIPLIES: tl.constexpr, TARGET: tl.constexpr, LOG2_FOLD_SCALE: tl.constexpr,
    EVEN: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Decode codes (R, K) with scales (R, K // BLOCK) to BF16, or fold them to TARGET.

    With a ``tensor_scale`` numbers are rounded to BF16, scales first if it MULTIPLIES them. SCALE
    is the scales' element format, None for E8M0. ``largest`` is the E8M0 byte that E8M0 scales are
    divided by, and ``out_scale`` what folded codes are multiplied by. LOG2_FOLD_SCALE is the
    logarithm of the fold scale. A ``table`` (see ``sections.py``) has operands to decode in place
    of one.
    """
    INVERSE_FOLD_SCALE: tl.constexpr = 2.0**-LOG2_FOLD_SCALE
    tile = tl.program_id(0)
    if table is not None:
        section = section_of(table, tile, DECODE_FIELDS, COUNT)
        if section < 0:
            return
        tile -= entry(table, section, FIRST_TILE, COUNT).to(tl.int32)
        codes = pointer(table, section, X, COUNT, codes)
        R = entry(table, section, ROWS, COUNT).to(tl.int32)
        K = tl.multiple_of(entry(table, section, COLUMNS, COUNT).to(tl.int32), 16)
        scales = pointer(table, section, SCALES, COUNT, scales)
        out = pointer(table, section, VALUES, COUNT, out)
    tiles = tl.cdiv(K, TN)
    row0 = (tile // tiles) * TM
    col0 = (tile % tiles) * TN
    if E.bits == 4:
        pairs = _load(codes, row0, col0 // 2, R, K // 2, TM, TN // 2, EVEN)
        code = tl.reshape(tl.join(pairs & 15, pairs >> 4), (TM, TN))
    else:
        code = _load(codes, row0, col0, R, K, TM, TN, EVEN)
    stored = _load(scales, row0, col0 // BLOCK, R, K // BLOCK, TM, TN // BLOCK, EVEN)
    if TARGET is None:
        if SCALE is None:
            scale = _power(stored + 0)
        else:
            scale = _decode(stored, SCALE)
        factor = 1.0 if tensor_scale is None else tl.load(tensor_scale)
        if MULTIPLIES:
            value = _decode(code, E) * over_block(scale * factor, TM, TN, BLOCK)
        else:
            value = _decode(code, E) * over_block(scale, TM, TN, BLOCK) * factor
        store_tile(out, bf16_values(value), row0, col0, R, K, EVEN)
    else:
        top = 1.0
        if SCALE is None:
            largest_byte = tl.load(largest).to(tl.int32)
            top = _power(largest_byte)
            # Only tiles of zeros have a larger scale.
            shift = tl.minimum(stored - largest_byte, 0)
            scale = tl.where(stored == 255, float("nan"), _power(shift + 127 + LOG2_FOLD_SCALE))
        else:
            scale = _decode(stored, SCALE) * (1.0 / INVERSE_FOLD_SCALE)
        if tl.program_id(0) == 0:
            tl.store(out_scale, top * INVERSE_FOLD_SCALE * tl.load(tensor_scale))
        value = _decode(code, E) * over_block(scale, TM, TN, BLOCK)
        store_tile(out, encode(value, value, TARGET, False), row0, col0, R, K, EVEN)
        if inexact is not None:
            lost = (round_nearest(value, TARGET) != tl.abs(value)) & (value == value)
            tl.atomic_add(inexact, tl.sum(tl.sum(lost.to(tl.int32), 1), 0).to(tl.int64))


@triton.jit
def _load(base, row0, col0, rows, columns, A: tl.constexpr, B: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile of a contiguous matrix of bytes as int32."""
    return load_raw(base, columns, 1, row0, col0, rows, columns, A, B, EVEN).to(tl.int32)


@triton.jit
def _power(byte):
    """Return 2 ** (byte - 127) in FP32, down to its smallest subnormal; 255 is NaN."""
    normal = byte << 23
    subnormal = 1 << tl.maximum(22 + byte, 0)
    bits = tl.where(byte > 0, normal, tl.where(byte < -22, 0, subnormal))
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _decode(code, E: tl.constexpr):
    """Decode codes (int32) to FP32."""
    LARGEST: tl.constexpr = (1 << (E.bits - 1)) - 1
    value = code_values(code & LARGEST, E)
    if E.nan_code != 0:
        value = tl.where(value > E.max, float("nan"), value)
    sign = (code >> (E.bits - 1)) << 31
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
