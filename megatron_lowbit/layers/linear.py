"""One linear layer, three GEMMs, each in the precision that a recipe gives it.

    fprop  Y  (M, N) = X  (M, K) . W  (N, K)^T    blocks along K
    dgrad  dX (M, K) = dY (M, N) . W^T(K, N)^T    blocks along N
    wgrad  dW (N, K) = dY^T(N, M) . X^T(K, M)^T   blocks along tokens M

A tensor that two GEMMs take is quantized for both at once, in one pass over it where the engine has
one. What wgrad needs of X is quantized in forward and kept packed; a weight in 16x16 blocks is
quantized once and serves fprop and dgrad with the same bits. A weight that no random number touches
is quantized once for all microbatches of a step. Nothing here asks which recipe it is.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lowbit.kernels.engine import Engine, select_engine
from megatron_lowbit.layers.call import (
    LinearCall,
    WeightCache,
    deliver_wgrad,
    draw_key,
    fprop_input,
    plain_input,
    quantize_gathered,
    quantize_grad,
    quantize_input,
    quantize_total,
    quantize_weight,
    reduce_dgrad,
)
from megatron_lowbit.layers.eager import eager
from megatron_lowbit.layers.saved import put_together, take_apart
from megatron_lowbit.layers.sharding import UNSHARDED, Shards, gather_columns
from megatron_lowbit.numerics import AmaxHistory, Operand
from megatron_lowbit.recipes.precision import LinearPrecision


class _LowbitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        fprop_input, kept_input = quantize_input(call, x)
        fprop_weight, dgrad_weight = quantize_weight(call, lambda: weight)
        plain = (plain_input(call, x), weight) if call.precision.fprop.fallback else None
        y = call.gemm("fprop", fprop_input, fprop_weight, x.dtype, bias, plain)
        if not (call.training and x.requires_grad):
            dgrad_weight = None
        _keep(ctx, kept_input, dgrad_weight)
        # Without the operand: its source would live until backward beside what is kept of it.
        ctx.call = call if call.operand is None else replace(call, operand=None)
        ctx.weight, ctx.has_bias = weight, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        call, weight = ctx.call, ctx.weight
        kept_input, dgrad_weight = _kept(ctx)
        by_row, by_col = quantize_grad(call, grad, *ctx.needs_input_grad[:2])
        dgrad = handle = wgrad = None
        if ctx.needs_input_grad[0]:
            if dgrad_weight is None:
                _, dgrad_weight = call.quantize(weight, None, call.request("dgrad", "weight", 0))
            plain = grad, weight.t()
            dgrad = call.gemm("dgrad", by_row, dgrad_weight, grad.dtype, plain=plain)
            by_row = dgrad_weight = None
            dgrad, handle = reduce_dgrad(call.shards, dgrad)
        if ctx.needs_input_grad[1]:
            wgrad = deliver_wgrad(call, weight, partial(_wgrad, call, by_col, kept_input, grad))
        bias_grad = grad.sum(dim=0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if handle is not None:
            handle.wait()
        return dgrad, wgrad, bias_grad, None


def _wgrad(call: LinearCall, lhs: Any, kept: Any, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """dW (N, K), of dY's transpose (N, M), quantized and in high precision."""
    if call.precision.wgrad.fallback:
        x = plain_input(call, kept)
        rhs = quantize_total(call, "wgrad", x)
        return call.gemm("wgrad", lhs, rhs, dtype, plain=(grad.t(), x.t()))
    if call.precision.wgrad.rhs_of_fprop:
        rhs = fprop_input(call, kept).dequantize().t()
    elif not isinstance(kept, Tensor):
        rhs = gather_columns(kept, call.shards.group) if call.shards.sequence_parallel else kept
    elif call.shards.sequence_parallel:
        rhs = quantize_gathered(call, "wgrad", kept)
    else:
        rhs = kept.t()
    return call.gemm("wgrad", lhs, rhs, dtype)


def _keep(ctx, *operands: Any) -> None:
    """Save operands for backward: tensors, None, and dataclasses of tensors and other things."""
    tensors: list[Tensor] = []
    ctx.described = [take_apart(operand, tensors) for operand in operands]
    ctx.save_for_backward(*tensors)


def _kept(ctx) -> list:
    """What :func:`_keep` saved."""
    tensors = iter(ctx.saved_tensors)
    return [put_together(description, tensors) for description in ctx.described]


@eager
def lowbit_linear(
    x: Tensor | Operand,
    weight: Tensor,
    precision: LinearPrecision,
    *,
    bias: Tensor | None = None,
    key: int | None = None,
    shards: Shards = UNSHARDED,
    engine: Engine | None = None,
    accumulate_main_grad: bool = False,
    amax_history: AmaxHistory | None = None,
    weight_cache: WeightCache | None = None,
    fallbacks: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` with each of the three GEMMs in the given precision.

    Args:
        x: (..., K), FP32 or BF16; or an Operand that is already quantized for fprop (``row``)
            and wgrad (``col``), gradients then going to its ``source``.
        weight: (N, K).
        precision: how each operand of each GEMM is quantized.
        bias: (N,), added in high precision.
        key: 64-bit key of stochastic rounding and of fresh signs, used in forward and backward of
            this call; None takes one from torch's default CPU generator.
        shards: how tensor parallelism splits the layer. Under sequence parallelism x's first
            axis is this rank's part and the result's is the whole.
        engine: where the arithmetic runs; None chooses by x's device.
        accumulate_main_grad: add dW to ``weight.main_grad`` (where the weight has one), as
            megatron-core's DistributedDataParallel expects of fused accumulation.
        amax_history: the state of delayed scaling, a row for each of ``recipes.OPERANDS``; read,
            and written where autograd records. Whoever owns it ends its steps.
        weight_cache: keeps the quantized weight for the next call, where autograd records.
        fallbacks: int64 (3,); for each of fprop, dgrad and wgrad, how many products were not
            finite and were computed again in high precision is added.

    Returns:
        (..., N) in x's dtype.
    """
    operand = x if isinstance(x, Operand) else None
    source = x.source if operand is not None else x
    call = LinearCall(
        precision=precision,
        engine=engine or select_engine(source.device),
        shards=shards,
        key=draw_key(precision) if key is None else key,
        accumulate_main_grad=accumulate_main_grad,
        training=torch.is_grad_enabled(),
        keep_input=torch.is_grad_enabled() and weight.requires_grad,
        operand=operand,
        amax_history=amax_history,
        weight_cache=weight_cache,
        fallbacks=fallbacks,
    )
    # Reshaped out here: megatron adds in place to the result, which autograd refuses for a view
    # that a function of its own has made.
    x2d = source.reshape(math.prod(source.shape[:-1]), source.shape[-1])
    y = _LowbitLinear.apply(x2d, weight, bias, call)
    leading = (-1, *source.shape[1:-1]) if shards.sequence_parallel else source.shape[:-1]
    return y.view(*leading, weight.shape[0])
