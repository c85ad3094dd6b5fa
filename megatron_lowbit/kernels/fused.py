"""The engine of NVIDIA GPUs: fused quantization, and the GEMM that the table of routes says."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_lowbit.kernels import routes
from megatron_lowbit.kernels.amaxes import tensor_amaxes
from megatron_lowbit.kernels.engine import Engine, accumulate_into, are_bf16
from megatron_lowbit.kernels.gemm import (
    PRODUCTS,
    PRODUCTS_TO,
    GpuOperand,
    exact_product,
    exact_product_to,
    folded_pair,
    plain,
    with_means,
)
from megatron_lowbit.kernels.grouped_gemm import grouped_pair, multiply_groups
from megatron_lowbit.kernels.launch import quantize_both
from megatron_lowbit.kernels.launch_sections import quantize_sections, takes_sections
from megatron_lowbit.kernels.means import residual_request, split_mean
from megatron_lowbit.kernels.norm import normalize_quantize, normalized_amax
from megatron_lowbit.kernels.norm_cases import takes as norm_takes
from megatron_lowbit.kernels.norm_grad import norm_grad
from megatron_lowbit.kernels.operand_group import TransposedGroup, representative_operand
from megatron_lowbit.kernels.operands import (
    ExactBF16,
    Transposed,
    exact_values,
    is_exact,
    rounded_values,
    transposed,
)
from megatron_lowbit.kernels.routes import Form, form_of_many, forms_of, written_form
from megatron_lowbit.kernels.split import as_matrix_list
from megatron_lowbit.numerics import (
    Accumulation,
    Amaxes,
    DelayedAmax,
    QuantizedTensor,
    Request,
    Requests,
    ScaleAmaxes,
)
from megatron_lowbit.numerics import gemm as reference_gemm
from megatron_lowbit.numerics import quantize_both as reference_quantize
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.mxnorm import MXNorm


class FusedEngine(Engine):
    """Triton quantization and tensor cores, on GPUs of one compute capability."""

    name = "fused"

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(f"GPU of compute capability {'.'.join(map(str, capability))}")
        self.capability = capability

    @property
    def _has_tensor_cores(self) -> bool:
        return self.capability >= routes.MIN_CAPABILITY

    def route(self, lhs: routes.Format, rhs: routes.Format, folding: bool = True) -> routes.Route:
        """Return the route of a pair of formats, one of them at least quantized, in any order."""
        return routes.route(lhs, rhs, self.capability, folding)

    def describe(self, lhs: routes.Format, rhs: routes.Format, folding: bool = True) -> str:
        """Describe the route of two formats and its sums."""
        return str(self.route(lhs, rhs, folding))

    def amaxes(self, x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
        """Return the tensor amaxes of both sides, from one pass over x."""
        if _any_splits_mean(row, col):
            return super().amaxes(x, row, col)
        return tensor_amaxes(x, row, col)

    def quantize(
        self,
        x: Tensor,
        row: Request | None,
        col: Request | None,
        amaxes: ScaleAmaxes = (None, None),
    ) -> tuple[GpuOperand | None, GpuOperand | None]:
        """Quantize both sides in one pass, each as its GEMM takes it.

        Codes of square blocks that serve both sides are made once. What has no kernel is quantized
        by the reference.
        """
        if _any_splits_mean(row, col):
            by_row = None if row is None else self._quantize_side(x, row, amaxes[0])
            return by_row, None if col is None else self._quantize_side(x.t(), col, amaxes[1])
        kinds = row and row.kind, col and col.kind
        found = forms_of(*kinds, row is col, x.dtype, self.capability)
        if found is None:
            return reference_quantize(x, row, col, amaxes)
        if row is not None and col is row:
            col = row.of_transpose
        forms = found.row, found.col
        if found.shared:
            _, by_col = quantize_both(x, None, col, amaxes, forms)
            return transposed(by_col), by_col
        return quantize_both(x, row, col, amaxes, forms)

    def _quantize_side(
        self, x: Tensor, request: Request, amax: Tensor | DelayedAmax | None
    ) -> GpuOperand | None:
        """Quantize x along its rows, or its residual from their mean, which the operand gets."""
        if not request.quantizer.splits_mean:
            return self.quantize(x, request, None, (amax, None))[0]
        mean, residual = split_mean(x)
        codes, _ = self.quantize(residual, residual_request(request), None, (amax, None))
        return replace(codes, mean=mean[None] if isinstance(codes, ExactBF16) else mean)

    def quantize_all(
        self, xs: Sequence[Tensor], rows: Requests | None, cols: Requests | None
    ) -> tuple[Sequence[GpuOperand] | None, Sequence[GpuOperand] | None]:
        """Quantize matrices of one kind by one launch where their formats have kernels for it."""
        xs = as_matrix_list(xs)
        if not takes_sections(xs, rows, cols):
            return super().quantize_all(xs, rows, cols)
        dtype, capability = xs.template.dtype, self.capability
        if rows is not None and cols is rows:
            cols = replace(rows, template=rows.template.of_transpose)
            found = forms_of(rows.template.kind, rows.template.kind, True, dtype, capability)
            if found is not None and found.shared:
                _, by_col = quantize_sections(xs, None, cols, (found.row, found.col))
                return TransposedGroup(by_col), by_col
        forms = [
            form_of_many(side and side.template.kind, dtype, capability) for side in (rows, cols)
        ]
        return quantize_sections(xs, rows, cols, (forms[0], forms[1]))

    def gemm_all(
        self,
        lhs: Sequence[GpuOperand],
        rhs: Sequence[GpuOperand],
        outs: Sequence[Tensor],
        beta: bool = False,
        accumulation: Accumulation | None = None,
        folding: bool = True,
    ) -> None:
        """Multiply by one launch; large matrices by one each, which cuBLAS computes faster."""
        pair, outs = None, as_matrix_list(outs)
        if accumulation is None and self.capability[0] == 9:
            route = self.route_of(representative_operand(lhs), representative_operand(rhs), folding)
            pair = grouped_pair(route, lhs, rhs, outs)
        if pair is not None:
            multiply_groups(*pair, outs, beta)
            return
        for left, right, out in zip(lhs, rhs, outs, strict=True):
            if _are_empty_codes(left, right):
                if not beta:
                    out.zero_()
            elif accumulation is not None or not self._write_product(
                out, left, right, beta, folding
            ):
                super().gemm_all([left], [right], [out], beta, accumulation, folding)

    def fold_losses(self, lhs: GpuOperand, rhs: GpuOperand) -> tuple[int, int]:
        """Return how many values of codes, of how many, the route of their formats rounds."""
        formats = [getattr(operand, "format", None) for operand in (lhs, rhs)]
        if None in formats or self.route(*formats) is not routes.FOLDED:
            return 0, 0
        inexact = torch.zeros((), dtype=torch.int64, device=lhs.codes.device)
        folded_pair(lhs, rhs, inexact)
        return int(inexact), math.prod(lhs.shape) + math.prod(rhs.shape)

    def normalize(
        self, x: Tensor, norm: MXNorm, request: Request, amax: Tensor | None = None
    ) -> tuple[GpuOperand, Tensor]:
        """Normalize and quantize, in one kernel for the cases that it takes."""
        if not norm_takes(x, norm, request):
            return super().normalize(x, norm, request, amax)
        form = written_form(request.kind, torch.float32, self.capability)
        # Folding would need the amax of what is normalized first.
        form = Form.BF16 if form is Form.BF16 else Form.CODES
        return normalize_quantize(x, norm, request, form, amax=amax)

    def normalized_amax(self, x: Tensor, norm: MXNorm, request: Request) -> Tensor:
        """Return the amax of what is normalized, from one pass for the cases of the kernel."""
        if not norm_takes(x, norm, request):
            return super().normalized_amax(x, norm, request)
        return normalized_amax(x, norm, request.quantizer.format.block)

    def norm_grad(self, grad: Tensor, x: Tensor, rho: Tensor) -> Tensor:
        """Return the gradient of a norm's input, by one kernel."""
        return norm_grad(grad, x, rho)

    def transposed(self, operand: QuantizedTensor) -> Transposed:
        """Return the transpose in the same memory; GEMMs of codes make a copy of it."""
        return Transposed(operand)

    def transpose(self, operand: QuantizedTensor, lhs: GpuOperand) -> ExactBF16 | Tensor:
        """Decode to BF16 numbers where both operands are exact in it, else to FP32."""
        exact = is_exact(operand) and is_exact(lhs) and self._has_tensor_cores
        if not exact or not operand.codes.numel():
            return super().transpose(operand, lhs)
        return exact_values(operand).t()

    def dequantize(self, operand: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Decode to BF16 by one kernel where blocks have BF16 numbers, and the tensor one scale."""
        taken = is_exact(operand) and operand.scales.numel() and operand.mean is None
        if taken and dtype is torch.bfloat16:
            return rounded_values(operand)
        return super().dequantize(operand, dtype)

    def gemm(
        self,
        lhs: GpuOperand,
        rhs: GpuOperand,
        bias: Tensor | None = None,
        accumulation: Accumulation | None = None,
        out_dtype: torch.dtype | None = None,
        folding: bool = True,
    ) -> Tensor:
        """Multiply on tensor cores; an accumulation is emulated."""
        lhs, rhs = with_means(lhs, rhs, self._has_tensor_cores)
        high_precision = isinstance(lhs, Tensor) and isinstance(rhs, Tensor)
        if accumulation is not None or high_precision or _are_empty_codes(lhs, rhs):
            return reference_gemm(plain(lhs), plain(rhs), bias, accumulation, out_dtype)
        found, operands = self._routed(lhs, rhs, folding)
        return PRODUCTS[found](*operands, bias, torch.float32 if out_dtype is None else out_dtype)

    def product_to(
        self,
        out: Tensor,
        lhs: GpuOperand,
        rhs: GpuOperand,
        beta: bool | Tensor = True,
        folding: bool = True,
    ) -> Tensor:
        """Write or add the product inside the GEMM where its route can."""
        if are_bf16(lhs, rhs):
            if out.dtype is torch.float32 and out.is_contiguous():
                exact_product_to(out, lhs, rhs, beta)
                return out
            return accumulate_into(out, exact_product(lhs, rhs, None, torch.float32), beta)
        if self._write_product(out, lhs, rhs, beta, folding):
            return out
        return super().product_to(out, lhs, rhs, beta, folding)

    def _write_product(
        self, out: Tensor, lhs: GpuOperand, rhs: GpuOperand, beta: bool | Tensor, folding: bool
    ) -> bool:
        """Write the product to ``out`` or add it, where the route can; else return False."""
        lhs, rhs = with_means(lhs, rhs, self._has_tensor_cores)
        quantized = not (isinstance(lhs, Tensor) and isinstance(rhs, Tensor))
        quantized = quantized and not _are_empty_codes(lhs, rhs)
        dtypes = (torch.float32, torch.bfloat16) if beta is False else (torch.float32,)
        if not quantized or out.dtype not in dtypes or not out.is_contiguous():
            return False
        found, operands = self._routed(lhs, rhs, folding)
        if found in PRODUCTS_TO:
            PRODUCTS_TO[found](out, *operands, beta)
        return found in PRODUCTS_TO

    def _routed(
        self, lhs: GpuOperand, rhs: GpuOperand, folding: bool
    ) -> tuple[routes.Route, tuple[GpuOperand, GpuOperand]]:
        """Return the route of two operands, and the operands as it takes them."""
        found = self.route_of(lhs, rhs, folding)
        return found, (lhs, rhs) if found.form is Form.BF16 else (plain(lhs), plain(rhs))

    def route_of(
        self, lhs: GpuOperand | BlockFormat, rhs: GpuOperand | BlockFormat, folding: bool = True
    ) -> routes.Route:
        """Return the route of two operands or formats, one of them at least quantized."""
        if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
            return self.route(lhs.format, rhs.format, folding)
        pair, formats = (lhs, rhs), []
        if any(isinstance(one, Tensor) and one.dtype is not torch.bfloat16 for one in pair):
            return routes.DEQUANTIZED
        for operand in pair:
            if isinstance(operand, ExactBF16):
                return routes.EXACT
            operand = operand.of if isinstance(operand, Transposed) else operand
            operand = operand.format if isinstance(operand, QuantizedTensor) else operand
            formats.append(None if isinstance(operand, Tensor) else operand)
        return self.route(formats[0], formats[1], folding)


def _any_splits_mean(*requests: Request | None) -> bool:
    """Return True if one of the requests splits the mean of rows off."""
    return any(one is not None and one.quantizer.splits_mean for one in requests)


def _are_empty_codes(lhs: GpuOperand, rhs: GpuOperand) -> bool:
    both = isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor)
    return both and 0 in (*lhs.shape, *rhs.shape)
