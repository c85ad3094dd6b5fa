"""GEMMs on a GPU, one for each route of ``kernels/routes.py``: how operands go to tensor cores."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megatron_lowbit.kernels import routes
from megatron_lowbit.kernels.cublas import scaled_matmul
from megatron_lowbit.kernels.engine import accumulate_into
from megatron_lowbit.kernels.means import add_means, without_mean
from megatron_lowbit.kernels.operands import ExactBF16, Transposed, exact_values, fold, is_exact
from megatron_lowbit.numerics import QuantizedTensor
from megatron_lowbit.numerics import gemm as reference
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tensor
from megatron_lowbit.numerics.folding import folded_format

GpuOperand = Tensor | QuantizedTensor | ExactBF16 | Transposed

_ALIGNMENT = 16
"""cuBLAS takes FP8 matrices whose sizes are multiples of this."""


def exact_product(
    lhs: GpuOperand, rhs: GpuOperand, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiply exact operands in BF16; tensor scales multiply the sums, means are added to them."""
    left, right = _as_values(lhs), _as_values(rhs)
    if left.mean is not None or right.mean is not None:
        y = exact_product(without_mean(left), without_mean(right), None, torch.float32)
        y = add_means(y, left, right)
        return (y if bias is None else y + bias).to(out_dtype)
    factor, fp32 = _factor(left, right), out_dtype is torch.float32
    if factor is not None:
        product_dtype = torch.float32 if fp32 else torch.bfloat16
        y = scaled_matmul(left.values, right.values, factor, product_dtype)
    elif fp32:
        y = torch.mm(left.values, right.values.t(), out_dtype=torch.float32)
    else:
        y = torch.mm(left.values, right.values.t())
    return (y if bias is None else y + bias).to(out_dtype)


def exact_product_to(out: Tensor, lhs: GpuOperand, rhs: GpuOperand, beta: bool | Tensor) -> None:
    """Write the product of exact operands to ``out`` (FP32 or BF16), or add it to that.

    ``beta`` of this and the functions below is as for :func:`scaled_matmul`.
    """
    left, right = _as_values(lhs), _as_values(rhs)
    if left.mean is not None or right.mean is not None:
        accumulate_into(out, exact_product(left, right, None, torch.float32), beta)
    else:
        scaled_matmul(left.values, right.values, _factor(left, right), out.dtype, out, beta)


def _factor(left: ExactBF16, right: ExactBF16) -> Tensor | None:
    """Multiply the tensor scales of two operands; None for 1."""
    if left.tensor_scale is None or right.tensor_scale is None:
        return right.tensor_scale if left.tensor_scale is None else left.tensor_scale
    return left.tensor_scale * right.tensor_scale


def _as_values(operand: GpuOperand) -> ExactBF16:
    if isinstance(operand, Tensor):
        if operand.dtype is not torch.bfloat16:  # cuBLAS is given a pointer, and would read on
            raise TypeError(f"BF16 numbers cannot be multiplied with an operand in {operand.dtype}")
        return ExactBF16(operand, None)
    return exact_values(operand)


def tile_product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiply FP8 tiles; cuBLAS adds up 128 products, scales them and adds in FP32."""
    y = torch._scaled_mm(*_tile_pair(lhs, rhs), out_dtype=_fp8_output(out_dtype))
    return _finish(y, lhs, rhs, bias, out_dtype)


def tile_product_to(
    out: Tensor, lhs: QuantizedTensor, rhs: QuantizedTensor, beta: bool | Tensor
) -> None:
    """Write the product of FP8 tiles to ``out`` (FP32 or BF16), or add it to that."""
    pair = _tile_pair(lhs, rhs)
    if beta is False and out.shape == (pair[0].shape[0], pair[1].shape[1]):
        torch._scaled_mm(*pair, out_dtype=out.dtype, out=out)
    else:
        accumulate_into(out, tile_product(lhs, rhs, None, _product_dtype(out, beta)), beta)


def _product_dtype(out: Tensor, beta: bool | Tensor) -> torch.dtype:
    """Return the dtype of a product that goes to ``out``; only a sum is rounded."""
    return out.dtype if beta is False else torch.float32


def _tile_pair(lhs: QuantizedTensor, rhs: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes (M, K) and (K, N) and their scales, as ``torch._scaled_mm`` takes them."""
    # cuBLAS reads square tiles' scales in rows of 16 bytes, and torch takes no padding there: K is
    # padded instead. torch.nn.functional.scaled_mm would, but takes tiles of E4M3 alone.
    square = TILE in (lhs.format.block_rows, rhs.format.block_rows)
    tiles = 4 if square else 1
    a, scale_a = _tile_operand(lhs, tiles)
    b, scale_b = _tile_operand(rhs, tiles)
    return a, b.t(), scale_a, scale_b.t()


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
    lhs: QuantizedTensor, rhs: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiply FP8 with a scale a tensor."""
    a, b = _aligned_pair(lhs, rhs)
    # torch.nn.functional.scaled_mm says the same through a function in Python.
    y = torch._scaled_mm(
        a, b.t(), lhs.tensor_scale, rhs.tensor_scale, out_dtype=_fp8_output(out_dtype)
    )
    return _finish(y, lhs, rhs, bias, out_dtype)


def tensor_product_to(
    out: Tensor, lhs: QuantizedTensor, rhs: QuantizedTensor, beta: bool | Tensor
) -> None:
    """Write the product of FP8 with a scale a tensor to ``out`` (FP32 or BF16), or add it.

    ``torch._scaled_mm`` would be given the scales themselves. Those of a group lie beside each
    other, and cuBLAS refuses them where they are not aligned.
    """
    a, b = _aligned_pair(lhs, rhs)
    factor = lhs.tensor_scale * rhs.tensor_scale
    if out.shape == (a.shape[0], b.shape[0]):
        scaled_matmul(a, b, factor, out.dtype, out, beta)
    else:
        product = scaled_matmul(a, b, factor, _product_dtype(out, beta))
        accumulate_into(out, product[: out.shape[0], : out.shape[1]], beta)


def _aligned_pair(lhs: QuantizedTensor, rhs: QuantizedTensor) -> tuple[Tensor, Tensor]:
    # Blocks of different lengths pad K differently.
    padded = max(lhs.codes.shape[1], rhs.codes.shape[1])
    return _aligned(lhs.codes, least=padded), _aligned(rhs.codes, least=padded)


def row_product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiply FP8 with a scale for each row of either operand; scales multiply finished sums."""
    (a, scale_a), (b, scale_b) = (_aligned_rows(q.codes, q.scales) for q in (lhs, rhs))
    rows, dtype = ScalingType.RowWise, _fp8_output(out_dtype)
    y = F.scaled_mm(a, b.t(), scale_a, rows, scale_b.t(), rows, output_dtype=dtype)
    return _finish(y, lhs, rhs, bias, out_dtype)


def folded_product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiply codes folded to FP8 with a scale a tensor, now or when they were written."""
    return tensor_product(*folded_pair(lhs, rhs), bias, out_dtype)


def folded_product_to(
    out: Tensor, lhs: QuantizedTensor, rhs: QuantizedTensor, beta: bool | Tensor
) -> None:
    """Write the product of folded codes to ``out`` (FP32 or BF16), or add it to that."""
    tensor_product_to(out, *folded_pair(lhs, rhs), beta)


def folded_pair(
    lhs: QuantizedTensor, rhs: QuantizedTensor, inexact: Tensor | None = None
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Fold what is not FP8 with a scale a tensor; count the rounded values in ``inexact``."""

    def folded(operand: QuantizedTensor, left: bool, partner: BlockFormat) -> QuantizedTensor:
        if isinstance(operand.format, FP8Tensor):
            return operand
        return fold(operand, folded_format(operand.format, left, partner), inexact)

    return folded(lhs, True, rhs.format), folded(rhs, False, lhs.format)


def _aligned_rows(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    codes = _aligned(codes)
    missing = codes.shape[0] - scales.shape[0]
    scales = F.pad(scales, (0, 0, 0, missing), value=1.0) if missing else scales
    return codes, scales


def dequantized_product(
    lhs: GpuOperand, rhs: GpuOperand, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiply dequantized operands in FP32, as the reference does."""
    return reference(plain(lhs), plain(rhs), bias, out_dtype=out_dtype)


def with_means(
    lhs: GpuOperand, rhs: GpuOperand, has_tensor_cores: bool
) -> tuple[GpuOperand, GpuOperand]:
    """Return operands, decoded where the mean of their rows was split off.

    Both are exact in BF16 then, or one becomes FP32 values.
    """
    if not _lacks_mean(lhs) and not _lacks_mean(rhs):
        return lhs, rhs
    exact = has_tensor_cores and is_exact(lhs) and is_exact(rhs)
    decode = exact_values if exact else QuantizedTensor.dequantize
    return (
        decode(lhs) if _lacks_mean(lhs) else lhs,  # type: ignore[arg-type]
        decode(rhs) if _lacks_mean(rhs) else rhs,  # type: ignore[arg-type]
    )


def _lacks_mean(operand: GpuOperand) -> bool:
    return isinstance(operand, QuantizedTensor) and operand.mean is not None


def plain(operand: GpuOperand) -> Tensor | QuantizedTensor:
    """Return the operand as the reference takes it."""
    if isinstance(operand, ExactBF16):
        return operand.dequantize()
    return operand.of.transpose() if isinstance(operand, Transposed) else operand


def _aligned(codes: Tensor, columns: int = _ALIGNMENT, least: int = 0) -> Tensor:
    """Pad codes (R, K) with zeros to whole alignments, whole ``columns`` and ``least`` of them."""
    width = max(codes.shape[1], least)
    bottom, right = -codes.shape[0] % _ALIGNMENT, width + -width % columns - codes.shape[1]
    if not bottom and not right:
        return codes
    return F.pad(codes.view(torch.uint8), (0, right, 0, bottom)).view(codes.dtype)


def _fp8_output(out_dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if out_dtype is torch.float32 else torch.bfloat16


def _finish(
    y: Tensor, lhs: QuantizedTensor, rhs: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Cut off what was added for alignment; add the bias."""
    rows, columns = lhs.shape[0], rhs.shape[0]
    if y.shape != (rows, columns):
        y = y[:rows, :columns].contiguous()
    y = y if bias is None else y + bias
    return y if y.dtype is dtype else y.to(dtype)


PRODUCTS = {
    routes.TILES: tile_product,
    routes.TENSORS: tensor_product,
    routes.ROWS: row_product,
    routes.FOLDED: folded_product,
    routes.EXACT: exact_product,
    routes.DEQUANTIZED: dequantized_product,
}
"""Function of each route."""

PRODUCTS_TO = {
    routes.TILES: tile_product_to,
    routes.TENSORS: tensor_product_to,
    routes.FOLDED: folded_product_to,
    routes.EXACT: exact_product_to,
}
"""Functions that write a product to a tensor or add it to that: all but tiles' inside the GEMM."""
