"""A norm and a linear layer in one, normalized by what the input's blocks say of its RMS.

Source: "MXNorm" (arXiv 2603.13180), section 3.7 and appendices E and F:

    H = MXNorm(X) . cast(W gain)^T              the gain goes into the weight before its cast
    dX' = cast(dH) . cast(W gain)               with respect to rho X
    dX = rho dX' - rho**3 / D * (sum_k dX'_k X_k) X     RMSNorm's, with rho for 1 / RMS
    M = cast(dH^T) . cast((rho X)^T)^T          rho X quantized anew, along tokens
    dW = M gain, dgain_j = sum_i M_ij W_ij      summed over the ranks that hold shards of W
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lowbit.kernels.engine import Engine, select_engine
from megatron_lowbit.layers.call import (
    LinearCall,
    WeightCache,
    deliver_wgrad,
    draw_key,
    quantize_gathered,
    quantize_grad,
    quantize_weight,
    reduce_dgrad,
)
from megatron_lowbit.layers.eager import eager
from megatron_lowbit.layers.saved import put_together, take_apart
from megatron_lowbit.layers.sharding import UNSHARDED, Shards, gather_rows
from megatron_lowbit.numerics import AmaxHistory
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.recipes.mxnorm import norm_block
from megatron_lowbit.recipes.precision import LinearPrecision


class _MXNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall,
        norm: MXNorm,
    ) -> Tensor:  # fmt: skip
        x2d = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        by_row, rho = _normalize(call, x2d, norm)
        by_row_weight, dgrad_weight = quantize_weight(call, lambda: weight.float() * gain.float())
        y = call.gemm("fprop", by_row, by_row_weight, x.dtype, bias)
        if not (call.training and x.requires_grad):
            dgrad_weight = None
        tensors: list[Tensor] = []
        ctx.dgrad_weight = take_apart(dgrad_weight, tensors)
        ctx.save_for_backward(x2d, rho, gain, *tensors)
        ctx.call, ctx.weight, ctx.x_shape, ctx.has_bias = call, weight, x.shape, bias is not None
        leading = (-1, *x.shape[1:-1]) if call.shards.sequence_parallel else x.shape[:-1]
        return y.view(*leading, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        call, weight = ctx.call, ctx.weight
        x, rho, gain, *tensors = ctx.saved_tensors
        needs_x, needs_gain, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        needs_product = needs_gain or needs_weight
        grad = grad_output.reshape(math.prod(grad_output.shape[:-1]), grad_output.shape[-1])
        by_row, by_col = quantize_grad(call, grad, needs_x, needs_product)
        inner = handle = product = None
        if needs_x:
            dgrad_weight = put_together(ctx.dgrad_weight, iter(tensors))
            if dgrad_weight is None:
                gained, request = weight.float() * gain.float(), call.request("dgrad", "weight", 0)
                _, dgrad_weight = call.quantize(gained, None, request)
            inner, handle = reduce_dgrad(
                call.shards, call.gemm("dgrad", by_row, dgrad_weight, grad.dtype)
            )
        if needs_product:
            product = _product(call, by_col, x.float() * rho)
        if handle is not None:
            handle.wait()
        return (
            call.engine.norm_grad(inner, x, rho).view(ctx.x_shape) if needs_x else None,
            _gain_grad(call.shards, product, weight).to(gain.dtype) if needs_gain else None,
            deliver_wgrad(call, weight, (product * gain.float()).to) if needs_weight else None,
            grad.sum(dim=0) if ctx.has_bias and needs_bias else None,
            None,
            None,
        )


def _normalize(call: LinearCall, x: Tensor, norm: MXNorm) -> tuple[Any, Tensor]:
    """fprop's input of all tokens, and 1 / RMS (R, 1) of this rank's."""
    sequence_parallel = call.shards.sequence_parallel
    if sequence_parallel and not call.gathers_codes("fprop", len(x)):
        rho = norm.inverse_rms(x, norm_block(call.precision))
        return quantize_gathered(call, "fprop", x.float() * rho), rho
    request = call.request("fprop", "input", len(x), kept=sequence_parallel)
    by_row, rho = call.engine.normalize(x, norm, request)
    return gather_rows(by_row, call.shards.group) if sequence_parallel else by_row, rho


def _product(call: LinearCall, lhs: Any, normalized: Tensor) -> Tensor:
    """M (N, D) in FP32, of dH's transpose and the normalized input (R, D) of this rank's tokens."""
    if call.shards.sequence_parallel:
        rhs = quantize_gathered(call, "wgrad", normalized)
    else:
        request = call.request("wgrad", "input", len(normalized))
        _, rhs = call.quantize(normalized, None, request)
    return call.gemm("wgrad", lhs, rhs, torch.float32)


def _gain_grad(shards: Shards, product: Tensor, weight: Tensor) -> Tensor:
    """dgain (D,), FP32, of all rows of W, whichever rank holds them.

    Under sequence parallelism of this rank's alone: norms' gradients are summed later then.
    """
    grad = (product * weight.float()).sum(0)
    if "weight" in shards.roles and not shards.sequence_parallel:
        dist.all_reduce(grad, group=shards.group)
    return grad


@eager
def mxnorm_linear(
    x: Tensor,
    gain: Tensor,
    weight: Tensor,
    precision: LinearPrecision,
    norm: MXNorm = MXNorm(),  # noqa: B008  frozen
    *,
    bias: Tensor | None = None,
    key: int | None = None,
    shards: Shards = UNSHARDED,
    engine: Engine | None = None,
    accumulate_main_grad: bool = False,
    amax_history: AmaxHistory | None = None,
    weight_cache: WeightCache | None = None,
) -> Tensor:
    """``MXNorm(x) @ (weight * gain).T + bias``, in a precision whose fprop quantizes in blocks.

    Args:
        x: (..., K), FP32 or BF16, K a multiple of the input format's block.
        gain: (K,), the norm's.
        weight: (N, K).
        precision: as for ``lowbit_linear``, like everything that follows ``norm``.
        norm: how the RMS is estimated.

    Returns:
        (..., N) in x's dtype.

    Raises:
        ValueError: fprop's input is not quantized in blocks, or K is not a multiple of one.
    """
    norm_block(precision)
    call = LinearCall(
        precision=precision,
        engine=engine or select_engine(x.device),
        shards=shards,
        key=draw_key(precision) if key is None else key,
        accumulate_main_grad=accumulate_main_grad,
        training=torch.is_grad_enabled(),
        keep_input=False,
        amax_history=amax_history,
        weight_cache=weight_cache,
    )
    return _MXNormLinear.apply(x, gain, weight, bias, call, norm)
