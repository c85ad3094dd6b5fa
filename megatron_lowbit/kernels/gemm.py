"""GEMMs on a GPU, a function for each route of ``routes.py``: how operands go to tensor cores.

Each function returns the product (M, N) in a dtype, BF16 or FP32; or writes it to a tensor of that
dtype, or adds it there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megatron_lowbit.kernels import routes
from megatron_lowbit.kernels.block_gemm import multiply_blocks
from megatron_lowbit.kernels.cublas import scaled_matmul
from megatron_lowbit.kernels.engine import Into, accumulate_into
from megatron_lowbit.kernels.means import add_means
from megatron_lowbit.kernels.operands import (
    ExactBF16,
    GpuOperand,
    Transposed,
    exact_values,
    fold,
    scaled_blocks,
)
from megatron_lowbit.numerics import QuantizedTensor
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tensor
from megatron_lowbit.numerics.folding import folded_format

_ALIGNMENT = 16
"""cuBLAS takes FP8 matrices whose sizes, and scales whose addresses, are multiples of this."""


def multiply(
    route: routes.Route,
    lhs: GpuOperand,
    rhs: GpuOperand,
    bias: Tensor | None,
    dtype: torch.dtype,
    into: Into = None,
) -> Tensor:
    """Multiply lhs (M, K) by rhs (N, K) by a route, as :meth:`Engine.gemm` does."""
    lhs, rhs = (lhs, rhs) if route is routes.EXACT else (plain(lhs), plain(rhs))
    if into is not None:
        out, beta = into
        # A sum is rounded to BF16 after it, so that a GEMM would round the product first.
        dtypes = (torch.float32,) if beta else (torch.float32, torch.bfloat16)
        if out.dtype in dtypes and out.is_contiguous():
            return GEMMS[route](lhs, rhs, out.dtype, into)
        return accumulate_into(out, beta, GEMMS[route](lhs, rhs, torch.float32))
    # A product with a bias is rounded once, after it: the bias may cancel most of the product.
    product = torch.bfloat16 if bias is None and dtype is torch.bfloat16 else torch.float32
    y = GEMMS[route](lhs, rhs, product)
    if bias is None:
        return y.to(dtype)
    return torch.add(y, bias.detach(), out=y.new_empty(y.shape, dtype=dtype))


def exact_product(
    lhs: GpuOperand, rhs: GpuOperand, dtype: torch.dtype, into: Into = None
) -> Tensor:
    """Multiply exact operands in BF16; tensor scales multiply the sums, means are added to them.

    A product with means or with scales of rows is in FP32.
    """
    left, right = _as_exact(lhs), _as_exact(rhs)
    row_scales = left.row_scales, right.row_scales
    if any(part is not None for part in (*row_scales, left.mean, right.mean)):
        y = exact_product(_without_rows(left), _without_rows(right), torch.float32)
        for scales, axis in zip(row_scales, (0, 1), strict=True):
            y = y if scales is None else y.mul_(scales.movedim(0, axis))
        y = add_means(y, left, right)
        return y if into is None else accumulate_into(*into, y)
    factor = left.tensor_scale if right.tensor_scale is None else right.tensor_scale
    if left.tensor_scale is not None and right.tensor_scale is not None:
        factor = left.tensor_scale * right.tensor_scale
    if into is not None or factor is not None:
        return scaled_matmul(left.values, right.values, factor, dtype, *into or ())
    if dtype is torch.float32:
        return torch.mm(left.values, right.values.t(), out_dtype=dtype)
    return torch.mm(left.values, right.values.t())


def _without_rows(operand: ExactBF16) -> ExactBF16:
    """Return the operand without its mean and without scales of rows."""
    scale = operand.tensor_scale if operand.row_scales is None else None
    return ExactBF16(operand.values, scale)


def _as_exact(operand: GpuOperand) -> ExactBF16:
    if isinstance(operand, Tensor):
        if operand.dtype is not torch.bfloat16:  # cuBLAS is given a pointer, and would read on
            raise TypeError(f"BF16 numbers cannot be multiplied with an operand in {operand.dtype}")
        return ExactBF16(operand, None)
    return exact_values(operand)


def tile_product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, dtype: torch.dtype, into: Into = None
) -> Tensor:
    """Multiply FP8 tiles; cuBLAS adds up 128 products, scales them and adds in FP32."""
    # cuBLAS reads square tiles' scales in rows of 16 bytes, and torch takes no padding there: K is
    # padded instead. torch.nn.functional.scaled_mm would, but takes only tiles of E4M3.
    tiles = 4 if TILE in (lhs.format.block_rows, rhs.format.block_rows) else 1
    (a, scale_a), (b, scale_b) = (_tile_operand(operand, tiles) for operand in (lhs, rhs))
    operands = a, b.t(), scale_a, scale_b.t()
    if into is not None and not into[1] and into[0].shape == (len(a), len(b)):
        return torch._scaled_mm(*operands, out_dtype=dtype, out=into[0])
    return _finish(torch._scaled_mm(*operands, out_dtype=dtype), lhs, rhs, into)


def _tile_operand(operand: QuantizedTensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Pad codes to whole groups of ``tiles`` along K; return also scales, rows first for 1x128."""
    codes, scales = _aligned(operand.codes, tiles * TILE), operand.scales
    square = operand.format.block_rows == TILE
    right = codes.shape[1] // TILE - scales.shape[1]
    bottom = 0 if square else codes.shape[0] - scales.shape[0]
    if right or bottom:
        scales = F.pad(scales, (0, right, 0, bottom), value=1.0)
    if square:
        return codes, scales.contiguous()
    by_columns = scales.stride() == (1, scales.shape[0])
    return codes, scales if by_columns else scales.t().contiguous().t()


def tensor_product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, dtype: torch.dtype, into: Into = None
) -> Tensor:
    """Multiply FP8 with a scale per tensor; other codes are folded to it first."""
    lhs, rhs = folded_pair(lhs, rhs)
    # Blocks of different lengths pad K differently.
    padded = max(lhs.codes.shape[1], rhs.codes.shape[1])
    a, b = (_aligned(operand.codes, least=padded) for operand in (lhs, rhs))
    scales = lhs.tensor_scale, rhs.tensor_scale
    # Scales of a group are neighbours in memory, and cuBLAS refuses those that are not aligned.
    aligned = all(scale.data_ptr() % _ALIGNMENT == 0 for scale in scales)
    factors = scales if aligned else scales[0] * scales[1]
    if into is not None and into[0].shape == (len(a), len(b)):
        return scaled_matmul(a, b, factors, dtype, *into)
    y = scaled_matmul(a, b, factors, dtype)
    return _finish(y, lhs, rhs, into)


def row_product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, dtype: torch.dtype, into: Into = None
) -> Tensor:
    """Multiply FP8 with a scale for each row of either operand; scales multiply finished sums."""
    (a, scale_a), (b, scale_b) = (_row_operand(operand) for operand in (lhs, rhs))
    rows = ScalingType.RowWise
    y = F.scaled_mm(a, b.t(), scale_a, rows, scale_b.t(), rows, output_dtype=dtype)
    return _finish(y, lhs, rhs, into)


def _row_operand(operand: QuantizedTensor) -> tuple[Tensor, Tensor]:
    codes, scales = _aligned(operand.codes), operand.scales
    missing = codes.shape[0] - scales.shape[0]
    return codes, F.pad(scales, (0, 0, 0, missing), value=1.0) if missing else scales


def folded_pair(
    lhs: QuantizedTensor, rhs: QuantizedTensor, inexact: Tensor | None = None
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Fold what is not FP8 with a scale per tensor; count the rounded values in ``inexact``."""

    def folded(operand: QuantizedTensor, left: bool, partner: BlockFormat) -> QuantizedTensor:
        if isinstance(operand.format, FP8Tensor):
            return operand
        return fold(operand, folded_format(operand.format, left, partner), inexact)

    return folded(lhs, True, rhs.format), folded(rhs, False, lhs.format)


def _aligned(codes: Tensor, columns: int = _ALIGNMENT, least: int = 0) -> Tensor:
    """Pad codes (R, K) with zeros to whole alignments, whole ``columns`` and ``least`` of them."""
    width = max(codes.shape[1], least)
    bottom, right = -codes.shape[0] % _ALIGNMENT, width + -width % columns - codes.shape[1]
    if not bottom and not right:
        return codes
    return F.pad(codes.view(torch.uint8), (0, right, 0, bottom)).view(codes.dtype)


def _finish(y: Tensor, lhs: QuantizedTensor, rhs: QuantizedTensor, into: Into) -> Tensor:
    """Cut off what was added for alignment; write or add the rest to a tensor that is given."""
    shape = lhs.shape[0], rhs.shape[0]
    y = y if y.shape == shape else y[: shape[0], : shape[1]]
    return y.contiguous() if into is None else accumulate_into(*into, y)


def block_product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, dtype: torch.dtype, into: Into = None
) -> Tensor:
    """Multiply codes times their inner scales in BF16; each 128 products are scaled in FP32."""
    y = multiply_blocks(*scaled_blocks(lhs), *scaled_blocks(rhs), dtype)
    return y if into is None else accumulate_into(*into, y)


GEMMS = {
    routes.TILES: tile_product,
    routes.BLOCKS: block_product,
    routes.TENSORS: tensor_product,
    routes.ROWS: row_product,
    routes.FOLDED: tensor_product,
    routes.EXACT: exact_product,
}
"""Function of each route; what is dequantized is multiplied by the reference."""


def plain(operand: GpuOperand) -> Tensor | QuantizedTensor:
    """Return the operand as the reference takes it."""
    if isinstance(operand, ExactBF16):
        return operand.dequantize()
    return operand.of.transpose() if isinstance(operand, Transposed) else operand
