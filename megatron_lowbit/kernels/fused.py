"""The engine of NVIDIA GPUs: fused quantization, and the GEMM that the table of routes says."""

import math

import torch
from torch import Tensor

from megatron_lowbit.kernels.gemm import (
    FoldedProduct,
    GpuOperand,
    dequantized_product,
    exact_product,
    plain,
    row_product,
    tensor_product,
    tile_product,
)
from megatron_lowbit.kernels.launch import quantize_both
from megatron_lowbit.kernels.norm import normalize_quantize
from megatron_lowbit.kernels.norm_cases import takes
from megatron_lowbit.kernels.operands import Transposed, Values, fold
from megatron_lowbit.kernels.routes import (
    DEQUANTIZED,
    EXACT,
    FOLDED,
    ROWS,
    TENSORS,
    TILES,
    Format,
    Route,
    route,
)
from megatron_lowbit.numerics import Accumulation, QuantizedTensor, Request
from megatron_lowbit.numerics import gemm as reference
from megatron_lowbit.numerics.mxnorm import MXNorm


class FusedEngine:
    """What a linear layer calls on one kind of device. ``folded`` counts what did not fold."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.folded = FoldedProduct()
        self._multiply = {
            TILES: tile_product,
            TENSORS: tensor_product,
            ROWS: row_product,
            FOLDED: self.folded,
            EXACT: exact_product,
            DEQUANTIZED: dequantized_product,
        }

    def route(self, lhs: Format, rhs: Format) -> Route:
        """How a pair of formats, one of them at least quantized, is multiplied; in any order."""
        return route(lhs, rhs, self.capability)

    def quantize(
        self, x: Tensor, row: Request | None, col: Request | None
    ) -> tuple[GpuOperand | None, GpuOperand | None]:
        """:func:`megatron_lowbit.numerics.quantize_both` in one pass, each side as its GEMM wants.

        x may have any strides. Of square blocks that serve both sides the codes are made once.
        """
        exact = [r is not None and self._is_exact(r, x.dtype) for r in (row, col)]
        values = [is_exact and not r.kept for is_exact, r in zip(exact, (row, col), strict=True)]
        if col is row and exact[0]:
            # Blocks along columns stay within a thread: the cheaper side.
            _, by_col = quantize_both(x, None, col, (False, values[1]))
            if isinstance(by_col, Values):
                return Values(by_col.values.t(), by_col.tensor_scale), by_col
            return Transposed(by_col), by_col
        return quantize_both(x, row, col, (values[0], values[1]))

    def fold_losses(self, lhs: GpuOperand, rhs: GpuOperand) -> tuple[int, int]:
        """Values of a product's operands that its folding rounds, of how many; they are kept."""
        formats = [getattr(operand, "format", None) for operand in (lhs, rhs)]
        if None in formats or self.route(*formats) is not FOLDED:
            return 0, 0
        inexact = torch.zeros((), dtype=torch.int64, device=lhs.codes.device)
        for operand in (lhs, rhs):
            fold(operand, inexact)
        return int(inexact), math.prod(lhs.shape) + math.prod(rhs.shape)

    def normalize(
        self, x: Tensor, norm: MXNorm, request: Request
    ) -> tuple[GpuOperand, Tensor] | None:
        """MXNorm and quantization in one kernel; None for what that does not take."""
        if not takes(x, norm, request):
            return None
        values = self._is_exact(request, torch.float32) and not request.kept
        return normalize_quantize(x, norm, request, values)

    def _is_exact(self, request: Request, dtype: torch.dtype) -> bool:
        """Whether the GEMM takes BF16 numbers: not beside an operand that stays in FP32."""
        if request.other is None and dtype is not torch.bfloat16:
            return False
        return self.route(request.quantizer.format, request.other).values

    def gemm(
        self,
        lhs: GpuOperand,
        rhs: GpuOperand,
        bias: Tensor | None = None,
        accumulation: Accumulation | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """:func:`megatron_lowbit.numerics.gemm` on tensor cores; an accumulation is emulated."""
        high_precision = isinstance(lhs, Tensor) and isinstance(rhs, Tensor)
        if accumulation is not None or high_precision or _are_empty_codes(lhs, rhs):
            return reference(plain(lhs), plain(rhs), bias, accumulation, out_dtype)
        found = self.route_of(lhs, rhs)
        if not found.values:
            lhs, rhs = plain(lhs), plain(rhs)
        multiply = self._multiply[found]
        return multiply(lhs, rhs, bias, torch.float32 if out_dtype is None else out_dtype)

    def route_of(self, lhs: GpuOperand, rhs: GpuOperand) -> Route:
        """The route of two operands, one of them at least quantized."""
        formats = []
        for operand in (lhs, rhs):
            if isinstance(operand, Values):
                return EXACT
            if isinstance(operand, Tensor) and operand.dtype is not torch.bfloat16:
                return DEQUANTIZED
            operand = operand.of if isinstance(operand, Transposed) else operand
            formats.append(None if isinstance(operand, Tensor) else operand.format)
        return self.route(*formats)


def _are_empty_codes(lhs: GpuOperand, rhs: GpuOperand) -> bool:
    both = isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor)
    return both and 0 in (*lhs.shape, *rhs.shape)
