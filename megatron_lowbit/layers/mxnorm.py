"""A norm and a linear layer in one, normalized by what the input's blocks say of its RMS.

Source: "MXNorm" (arXiv 2603.13180), section 3.7 and appendices E and F:

    H = MXNorm(X) . cast(W gain)^T              the gain goes into the weight before its cast
    dX' = cast(dH) . cast(W gain)               with respect to rho X
    dX = rho dX' - rho**3 / D * (sum_k dX'_k X_k) X     RMSNorm's, with rho for 1 / RMS
    M = cast(dH^T) . cast((rho X)^T)^T          rho X quantized again, along tokens
    dW = M gain, dgain_j = sum_i M_ij W_ij      summed over the ranks that hold shards of W
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.kernels.engine import accumulate_into
from megatron_lowbit.layers import operands
from megatron_lowbit.layers.autograd_state import (
    eager,
    once_differentiable,
    restore,
    save,
    without_autocast,
)
from megatron_lowbit.layers.context import LinearContext
from megatron_lowbit.layers.linear import by_rows, context_of
from megatron_lowbit.layers.sharding import Shards, start_gather
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.recipes import LinearPrecision, Recipe
from megatron_lowbit.recipes.recipe import norm_block


class _MXNormLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        context: LinearContext,
        norm: MXNorm,
    ) -> Tensor:
        fprop_input, rho = _normalize(context, x, norm)
        fprop_weight, dgrad_weight = operands.quantize_weight(
            context, lambda: _gained(weight, gain)
        )
        y = context.gemm(Gemm.FPROP, fprop_input, fprop_weight, x.dtype, bias)
        if not (context.training and x.requires_grad):
            dgrad_weight = None
        # The gain's gradient takes the weight, too.
        save(ctx, (x, rho, gain, dgrad_weight), [weight] if context.training else [])
        ctx.context, ctx.weight, ctx.has_bias = context, weight, bias is not None
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context, weight = ctx.context, ctx.weight
        x, rho, gain, dgrad_weight = restore(ctx)
        needs_x, needs_gain, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        needs_product = needs_gain or needs_weight
        by_row, by_col = operands.quantize_grad(context, grad, needs_x, needs_product)
        inner = handle = None
        if needs_x:
            if dgrad_weight is None:
                dgrad_weight = operands.quantize_dgrad_weight(context, _gained(weight, gain))
            inner, handle = operands.reduce_dgrad(
                context.shards, context.gemm(Gemm.DGRAD, by_row, dgrad_weight, grad.dtype)
            )
        product = None
        if needs_product:
            normalized = operands.quantize_gathered(context, Gemm.WGRAD, x.float() * rho)
            product = context.gemm(Gemm.WGRAD, by_col, normalized, torch.float32)
        if handle is not None:
            handle.wait()
        gain_grad = wgrad = None
        if product is not None and needs_gain:
            gain_grad = _gain_grad(context.shards, product, weight).to(gain.dtype)
        if product is not None and needs_weight:
            gained = product * gain.float()
            into = operands.main_grad_of(context, weight)
            if into is None:
                wgrad = gained.to(weight.dtype)
            else:
                accumulate_into(*into, gained)
                wgrad = operands.added_to_main_grads([weight])[0]
        return (
            context.engine.norm_grad(inner, x, rho) if needs_x else None,
            gain_grad,
            wgrad,
            grad.sum(dim=0) if ctx.has_bias and needs_bias else None,
            None,
            None,
        )


def _gained(weight: Tensor, gain: Tensor) -> Tensor:
    return weight.float() * gain.float()


def _normalize(context: LinearContext, x: Tensor, norm: MXNorm) -> tuple[Any, Tensor]:
    """Return fprop's input of all tokens, and 1 / RMS (R, 1) of this rank's."""
    split = context.shards.sequence_parallel
    if split and not context.plan(len(x))[Gemm.FPROP, Role.INPUT].gathers_codes:
        rho = norm.inverse_rms(x, norm_block(context.precision))
        return operands.quantize_gathered(context, Gemm.FPROP, x.float() * rho), rho
    request = context.request(Gemm.FPROP, Role.INPUT, len(x))
    assert request is not None, "norm_block raises for an input in high precision"
    scale_amax = None
    if context.shares_amax(Gemm.FPROP, Role.INPUT):
        scale_amax = partial(context.scale_amax, Gemm.FPROP, Role.INPUT)
    by_row, rho = context.engine.normalize(x, norm, request, scale_amax)
    return start_gather(by_row, context.shards.group)() if split else by_row, rho


def _gain_grad(shards: Shards, product: Tensor, weight: Tensor) -> Tensor:
    """Compute dgain (D,), FP32, of all rows of W, whichever rank holds them.

    Under sequence parallelism only of this rank's rows: norms' gradients are summed later then.
    """
    grad = (product * weight.float()).sum(0)
    if Role.WEIGHT in shards.roles and not shards.sequence_parallel:
        dist.all_reduce(grad, group=shards.group)
    return grad


@eager
def mxnorm_linear(
    x: Tensor,
    gain: Tensor,
    weight: Tensor,
    context: LinearContext | LinearPrecision | Recipe | str,
    norm: MXNorm = MXNorm(),  # noqa: B008  frozen
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``MXNorm(x) @ (weight * gain).T + bias``; fprop quantizes in blocks.

    Args:
        x: (..., K), FP32 or BF16, K a multiple of the input format's block.
        gain: (K,), the norm's.
        weight: (N, K).
        context: as for :func:`megatron_lowbit.layers.lowbit_linear`.
        norm: how the RMS is estimated.
        bias: (N,), added in high precision.

    Returns:
        (..., N) in x's dtype.

    Raises:
        ValueError: fprop's input is not quantized in blocks, K is not a multiple of one, or the
            precision has ``fallback`` or ``hot_channels``, which read the whole input.
    """
    context = context_of(context, x)
    norm_block(context.precision)
    if context.precision.keeps_sources:
        raise ValueError("mxnorm_linear takes no fallback or hot_channels")
    return by_rows(_MXNormLinear, x, context.shards, gain, weight, bias, context, norm)
