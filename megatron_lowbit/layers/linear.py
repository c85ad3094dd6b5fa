"""One linear layer, three GEMMs, each in the precision that a recipe gives it.

    fprop  Y  (M, N) = X  (M, K) . W  (N, K)^T    blocks along K
    dgrad  dX (M, K) = dY (M, N) . W^T(K, N)^T    blocks along N
    wgrad  dW (N, K) = dY^T(N, M) . X^T(K, M)^T   blocks along tokens M

A tensor that two GEMMs take is quantized for both at once, in one pass over it where the engine has
one. What wgrad needs of X is quantized in forward and kept packed; a weight in 16x16 blocks is
quantized once and serves fprop and dgrad with the same bits. A weight that no random number touches
is quantized once for all microbatches of a step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.errors import require, require_type
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import operands
from megatron_lowbit.layers.autograd_state import (
    eager,
    once_differentiable,
    restore,
    save,
    without_autocast,
)
from megatron_lowbit.layers.context import LinearContext, draw_key
from megatron_lowbit.layers.sharding import Shards
from megatron_lowbit.numerics import Operand
from megatron_lowbit.numerics.gemms import Gemm
from megatron_lowbit.recipes import LinearPrecision, Recipe, load_precision


def forward_linear(
    context: LinearContext,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operand: Operand | None,
    needs: tuple[bool, bool],
    amax: Tensor | None = None,
) -> tuple[Tensor, tuple[Any, Any]]:
    """Compute Y = X . W^T.

    Args:
        context: of the call.
        x: input (R, K) of this rank.
        weight: (N, K).
        bias: (N,), or None.
        operand: x that is quantized already, or None.
        needs: True for dgrad and for wgrad, if they follow.
        amax: x's own, FP32 (), where it is known.

    Returns:
        Y (M, N) of all tokens, and what :func:`backward_linear` takes of input and weight.
    """
    fprop_input, saved_input = operands.quantize_input(context, x, operand, needs[1], amax)
    fprop_weight, dgrad_weight = operands.quantize_weight(context, lambda: weight)
    # Y = X . W^T
    y = context.gemm(Gemm.FPROP, fprop_input(), fprop_weight, x.dtype, bias)
    return y, (saved_input, dgrad_weight if needs[0] else None)


def backward_linear(
    context: LinearContext,
    weight: Tensor,
    saved: Sequence[Any],
    grad: Tensor,
    needs: tuple[bool, bool],
    amax: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dX = dY . W, and dW = dY^T . X into its main gradient where it has one.

    Args:
        context: of the call.
        weight: (N, K).
        saved: what :func:`forward_linear` gave.
        grad: dY (M, N) of all tokens.
        needs: True for dX and for dW, if they are wanted.
        amax: dY's own, FP32 (), where it is known.

    Returns:
        dX (R, K) of this rank, and dW or what autograd takes instead.
    """
    saved_input, dgrad_weight = saved
    if needs[1]:
        wgrad_input = operands.start_wgrad_input(context, saved_input)
    dgrad_grad, wgrad_grad = operands.quantize_grad(context, grad, *needs, amax)
    dgrad = handle = wgrad = None
    if needs[0]:
        dgrad_weight = operands.quantize_dgrad_weight(context, weight, dgrad_weight)
        # dX = dY . W
        dgrad = context.gemm(Gemm.DGRAD, dgrad_grad, dgrad_weight, grad.dtype)
        dgrad_grad = dgrad_weight = None
        dgrad, handle = operands.reduce_dgrad(context.shards, dgrad)
    if needs[1]:
        # dW = dY^T . X
        into = operands.main_grad_of(context, weight)
        dtype = weight.dtype if into is None else torch.float32
        wgrad = context.gemm(Gemm.WGRAD, wgrad_grad, wgrad_input(), dtype, into=into)
        if into is not None:
            wgrad = operands.added_to_main_grads([weight])[0]
    if handle is not None:
        handle.wait()
    return dgrad, wgrad


class _LowbitLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        context: LinearContext,
        operand: Operand | None,
        amax: Tensor | None,
    ) -> Tensor:
        needs = (context.training and x.requires_grad, context.training and weight.requires_grad)
        y, saved = forward_linear(context, x, weight, bias, operand, needs, amax)
        save(ctx, saved, [weight] if needs[0] else [])
        ctx.context, ctx.weight, ctx.has_bias = context, weight, bias is not None
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
        needs = needs_dgrad, needs_wgrad
        dgrad, wgrad = backward_linear(ctx.context, ctx.weight, restore(ctx), grad, needs)
        bias_grad = grad.sum(dim=0) if ctx.has_bias and needs_bias else None
        return dgrad, wgrad, bias_grad, None, None, None


@eager
def lowbit_linear(
    x: Tensor | Operand,
    weight: Tensor,
    context: LinearContext | LinearPrecision | Recipe | str,
    bias: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """Compute ``x @ weight.T + bias`` with each of the three GEMMs in the given precision.

    Autocast has no effect on it.

    Args:
        x: (..., K), FP32 or BF16; or an Operand that is already quantized for fprop (``row``)
            and wgrad (``col``), gradients then going to its ``source``. Under sequence parallelism
            its first axis is this rank's part, and the result's is the whole.
        weight: (N, K), in x's dtype, as the bias.
        context: precision and state of the call. A precision, or a recipe or its name as for
            :func:`megatron_lowbit.recipes.load_precision`, computes on x's device, with a key from
            torch's default CPU generator.
        bias: (N,), added in high precision.
        amax: x's own, FP32 (), where it is known; the result is the same without.

    Returns:
        (..., N) in x's dtype.

    Raises:
        RuntimeError: in the backward pass, as for ``nn.Linear``, if the weight changed in place.
        TypeError: an argument of another type.
        UserError: another dtype, or shapes that do not fit together.
    """
    source, operand = (x.source, x) if isinstance(x, Operand) else (x, None)
    for name, tensor in (("x", source), ("weight", weight), ("bias", bias)):
        if tensor is not None or name != "bias":
            require_type(name, tensor, Tensor, "a tensor")
    check_dtypes(source, weight, bias)
    require(
        source.shape[-1:] == weight.shape[1:],
        f"input {tuple(source.shape)}, weight {tuple(weight.shape)}; they must be (..., K) and "
        "(N, K)",
    )
    context = context_of(context, source)
    return by_rows(_LowbitLinear, source, context.shards, weight, bias, context, operand, amax)


def check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise UserError unless all tensors are FP32, or all BF16."""
    of_bias = None if bias is None else bias.dtype
    require(
        x.dtype in (torch.float32, torch.bfloat16)
        and x.dtype == weight.dtype
        and of_bias in (None, x.dtype),
        f"input {x.dtype}, weight {weight.dtype}, bias {of_bias}; all must be float32, or all "
        "bfloat16",
    )


def by_rows(function: Any, x: Tensor, shards: Shards, *arguments: Any) -> Tensor:
    """Apply an autograd function of rows (T, K) to x (..., K); return (..., N) of all tokens."""
    # Reshaped out here: megatron adds in place to the result, which autograd refuses for a view
    # that a function of its own has made.
    y: Tensor = function.apply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), *arguments)
    leading = (-1, *x.shape[1:-1]) if shards.sequence_parallel else x.shape[:-1]
    return y.view(*leading, y.shape[-1])


def context_of(context: LinearContext | LinearPrecision | Recipe | str, x: Tensor) -> LinearContext:
    """Return the context of a call with input x, which is in training where autograd records.

    Raises ValueError for an input on another GPU than the current one, which kernels run on.
    """
    if x.is_cuda and x.device.index != (current := torch.cuda.current_device()):
        raise ValueError(
            f"the input is on {x.device}, but the current device is cuda:{current}: use a process "
            "for each GPU, or torch.cuda.device"
        )
    if not isinstance(context, LinearContext):
        precision = load_precision(context)
        context = LinearContext(precision, select_engine(x.device), draw_key(precision))
    training = torch.is_grad_enabled()
    return context if context.training == training else replace(context, training=training)
