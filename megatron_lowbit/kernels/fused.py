"""The engine of NVIDIA GPUs: fused quantization, and the GEMM that the table of routes says."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from megatron_lowbit.kernels import routes
from megatron_lowbit.kernels.amaxes import tensor_amaxes
from megatron_lowbit.kernels.device_tables import MAX_MATRICES
from megatron_lowbit.kernels.embedding import add_rows
from megatron_lowbit.kernels.engine import GpuEngine, Into, Pairs, ScaleAmax
from megatron_lowbit.kernels.gemm import folded_pair, multiply, plain
from megatron_lowbit.kernels.grouped_gemm import LOOP_FROM, grouped_pair, multiply_groups
from megatron_lowbit.kernels.launch import quantize_both
from megatron_lowbit.kernels.launch_sections import quantize_sections, takes_request, takes_sections
from megatron_lowbit.kernels.means import split_mean, splits_mean, with_means
from megatron_lowbit.kernels.norm import norm_grad, normalize_quantize, normalized_amax
from megatron_lowbit.kernels.operand_group import place_rows, representative_operand
from megatron_lowbit.kernels.operands import (
    ExactBF16,
    GpuOperand,
    Transposed,
    exact_values,
    is_exact,
    rounded_values,
    transposed,
)
from megatron_lowbit.kernels.rms_norm import rms_norm
from megatron_lowbit.kernels.routes import Form, forms_of, takes_norm, written_form
from megatron_lowbit.kernels.split import Rows, as_matrix_list
from megatron_lowbit.kernels.swiglu import swiglu, swiglu_grad
from megatron_lowbit.numerics import (
    Accumulation,
    DelayedAmax,
    QuantizedTensor,
    Request,
    Requests,
    ScaleAmaxes,
)
from megatron_lowbit.numerics import quantize_both as reference_quantize
from megatron_lowbit.numerics.block_formats.fp8 import TILE
from megatron_lowbit.numerics.mxnorm import MXNorm


class FusedEngine(GpuEngine):
    """Triton quantization and FP8 tensor cores, on GPUs of one compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(capability)
        # By Hopper's tensor memory accelerator.
        self.multiplies_groups = capability[0] == 9

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
        if splits_mean(row, col):
            sides = zip((x, x.t()), (row, col), amaxes, strict=True)
            by_row, by_col = (self._quantize_residual(*side) for side in sides)
            return by_row, by_col
        keyless = row and row.keyless, col and col.keyless
        forms = forms_of(*keyless, row is col, x.dtype, self.capability)
        if forms is None:
            return reference_quantize(x, row, col, amaxes)
        *sides, shared = forms
        if row is not None and col is row:
            col = row.of_transpose
        if shared:
            _, by_col = quantize_both(x, None, col, amaxes, sides)
            return transposed(by_col), by_col
        return quantize_both(x, row, col, amaxes, sides)

    def _quantize_residual(
        self, x: Tensor, request: Request | None, amax: Tensor | DelayedAmax | None
    ) -> GpuOperand | None:
        """Quantize x, or the residual from the mean of its rows, which the operand then has."""
        if request is None or not request.quantizer.splits_mean:
            return None if request is None else self.quantize(x, request, None, (amax, None))[0]
        mean, residual = split_mean(x)
        request = replace(request, quantizer=replace(request.quantizer, splits_mean=False))
        operand, _ = self.quantize(residual, request, None, (amax, None))
        return replace(operand, mean=mean[None] if isinstance(operand, ExactBF16) else mean)

    def quantize_all(
        self, xs: Sequence[Tensor], rows: Requests | None, cols: Requests | None
    ) -> tuple[Sequence[GpuOperand] | None, Sequence[GpuOperand] | None]:
        """Quantize similar matrices by one launch where their formats have kernels for it."""
        xs = as_matrix_list(xs)
        if not takes_sections(xs, rows, cols):
            return super().quantize_all(xs, rows, cols)
        keyless = [side and side.template.keyless for side in (rows, cols)]
        dtype, same = xs.template.dtype, cols is rows
        *forms, shared = forms_of(*keyless, same, dtype, self.capability, many=True)
        if same:
            cols = replace(rows, template=rows.template.of_transpose)
        if shared:
            _, by_col = quantize_sections(xs, None, cols, forms)
            return replace(by_col, transposes=True), by_col
        return quantize_sections(xs, rows, cols, forms)

    def split_rows(
        self, codes: QuantizedTensor, rows: Rows, request: Request
    ) -> Sequence[GpuOperand]:
        """Place rows as one launch would have where their format has kernels for it."""
        if not takes_request(request.keyless) or not codes.shape[0]:
            return super().split_rows(codes, rows, request)
        return place_rows(codes, rows, request)

    def takes_counts(self, pairs: Pairs, weights: Sequence[Tensor], rows: int) -> bool:
        """Return True where each operation is one launch, and would be with known numbers."""
        (out_features, in_features), count = weights[0].shape, len(weights)
        return (
            self.multiplies_groups
            and weights[0].dtype is torch.bfloat16
            and out_features % 16 == in_features % 16 == 0
            and count <= MAX_MATRICES
            and 0 < 2 * rows * out_features * in_features < LOOP_FROM * count
            and all(_takes_counts(*pair, self.capability) for pair in pairs)
        )

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
        outs = as_matrix_list(outs)
        if accumulation is None and self.multiplies_groups:
            route = self.route(representative_operand(lhs), representative_operand(rhs), folding)
            pair = grouped_pair(route, lhs, rhs, outs)
            if pair is not None:
                multiply_groups(*pair, outs, beta)
                return
        for left, right, out in zip(lhs, rhs, outs, strict=True):
            if _are_empty_codes(left, right):
                if not beta:
                    out.zero_()
            elif accumulation is None:
                self.gemm(left, right, None, None, torch.float32, folding, (out, beta))
            else:
                super().gemm_all([left], [right], [out], beta, accumulation, folding)

    def fold_losses(self, lhs: GpuOperand, rhs: GpuOperand) -> tuple[int, int]:
        """Return the numbers of values that the route of both formats rounds, and of all."""
        are_codes = isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor)
        if not are_codes or self.route(lhs, rhs) is not routes.FOLDED:
            return 0, 0
        inexact = torch.zeros((), dtype=torch.int64, device=lhs.codes.device)
        folded_pair(lhs, rhs, inexact)
        return int(inexact), math.prod(lhs.shape) + math.prod(rhs.shape)

    def normalize(
        self, x: Tensor, norm: MXNorm, request: Request, scale_amax: ScaleAmax | None = None
    ) -> tuple[GpuOperand, Tensor]:
        """Normalize and quantize, in one kernel for the cases that it takes."""
        if not takes_norm(x, norm, request):
            return super().normalize(x, norm, request, scale_amax)
        amax = None
        if scale_amax is not None:
            amax = scale_amax(normalized_amax(x, norm, request.quantizer.format.block))
        form = written_form(request.keyless, torch.float32, self.capability)
        # Folding would need the amax of what is normalized first.
        form = Form.BF16 if form is Form.BF16 else Form.CODES
        return normalize_quantize(x, norm, request, form, amax=amax)

    # One kernel each, and a view: GEMMs of codes make a copy of it.
    amaxes = staticmethod(tensor_amaxes)
    norm_grad = staticmethod(norm_grad)
    rms_norm = staticmethod(rms_norm)
    add_rows = staticmethod(add_rows)
    swiglu = staticmethod(swiglu)
    swiglu_grad = staticmethod(swiglu_grad)
    transposed = Transposed

    def transpose(self, operand: QuantizedTensor, lhs: GpuOperand) -> ExactBF16 | Tensor:
        """Decode to BF16 numbers where both operands are exact in it, else to FP32."""
        exact = is_exact(operand) and is_exact(lhs)
        # Scales of rows lie along the terms of a product with the transpose.
        exact = exact and not operand.format.scales_tensor_rows
        if not exact or not operand.codes.numel():
            return super().transpose(operand, lhs)
        return exact_values(operand).t()

    def dequantize(self, operand: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Decode to BF16 by one kernel where blocks have BF16 numbers, and the tensor one scale."""
        taken = is_exact(operand) and operand.scales.numel() and operand.mean is None
        taken = taken and not operand.format.scales_tensor_rows
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
        into: Into = None,
    ) -> Tensor:
        """Multiply on tensor cores; an accumulation is emulated."""
        lhs, rhs = with_means(lhs, rhs)
        route = self.route(lhs, rhs, folding)
        unrouted = route is routes.DEQUANTIZED or _are_empty_codes(lhs, rhs)
        are_tensors = isinstance(lhs, Tensor) and isinstance(rhs, Tensor)
        if accumulation is not None or unrouted or (into is None and are_tensors):
            operands = plain(lhs), plain(rhs)
            return super().gemm(*operands, bias, accumulation, out_dtype, folding, into)
        return multiply(route, lhs, rhs, bias, out_dtype or torch.float32, into)

    def route(
        self, lhs: GpuOperand | routes.Format, rhs: GpuOperand | routes.Format, folding: bool = True
    ) -> routes.Route:
        """Return the route of two operands or formats, one at least quantized, in any order."""
        pair = [side.of if isinstance(side, Transposed) else side for side in (lhs, rhs)]
        if any(isinstance(side, Tensor) and side.dtype is not torch.bfloat16 for side in pair):
            return routes.DEQUANTIZED
        if any(isinstance(side, ExactBF16) for side in pair):
            return routes.EXACT
        formats = [side.format if isinstance(side, QuantizedTensor) else side for side in pair]
        left, right = (None if isinstance(f, Tensor) else f for f in formats)
        return routes.route(left, right, self.capability, folding)


@cache
def _takes_counts(
    lhs: Request | None, rhs: Request | None, folding: bool, capability: tuple[int, int]
) -> bool:
    """Return True if one launch quantizes and one multiplies operands of any rows."""
    requests = [request for request in (lhs, rhs) if request is not None]
    formats = [request and request.quantizer.format for request in (lhs, rhs)]
    route = routes.route(*formats, capability, folding)
    if not all(map(takes_request, requests)):
        return False
    if route is routes.EXACT:
        return all(request.quantizer.format.block > 1 for request in requests)
    if route is routes.TILES:
        return [format.block_rows for format in formats] == [1, TILE]
    folds = not any(request.needs_codes for request in requests)
    return route is routes.TENSORS or (route is routes.FOLDED and folds)


def _are_empty_codes(lhs: GpuOperand, rhs: GpuOperand) -> bool:
    both = isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor)
    return both and 0 in (*lhs.shape, *rhs.shape)
