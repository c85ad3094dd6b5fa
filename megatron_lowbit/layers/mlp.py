"""An MLP with SwiGLU, two linear layers under a recipe, as one function of autograd.

    gate, up = X . W1^T
    H        = silu(gate) * up
    Y        = H . W2^T

The kernel that writes H, or the gradient of gate and up, takes its amax on the way, so that no pass
over them comes before they are quantized. The gradient takes the memory of gate and up, which
autograd keeps until the whole backward pass of the function has ended.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_lowbit.layers.autograd_state import (
    eager,
    once_differentiable,
    restore,
    save,
    without_autocast,
)
from megatron_lowbit.layers.context import LinearContext
from megatron_lowbit.layers.linear import backward_linear, by_rows, context_of, forward_linear


class _LowbitMLP(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        fc1: Tensor,
        fc2: Tensor,
        first: LinearContext,
        second: LinearContext,
        amax: Tensor | None,
    ) -> Tensor:
        training = first.training
        needs = training and x.requires_grad, training and fc1.requires_grad
        gate_up, saved_first = forward_linear(first, x, fc1, None, None, needs, amax)
        h, h_amax = second.engine.swiglu(gate_up)
        needs_second = any(needs), training and fc2.requires_grad
        y, saved_second = forward_linear(second, h, fc2, None, None, needs_second, h_amax)
        save(ctx, [*saved_first, *saved_second, gate_up if any(needs) else None], (fc1, fc2))
        ctx.weights, ctx.contexts, ctx.needs = (fc1, fc2), (first, second), (needs, needs_second)
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, gate_up = restore(ctx)
        (fc1, fc2), (first, second), (needs, needs_second) = ctx.weights, ctx.contexts, ctx.needs
        dh, fc2_grad = backward_linear(second, fc2, saved[2:], grad, needs_second)
        dx = fc1_grad = None
        if dh is not None:
            amax = first.engine.swiglu_grad(gate_up, dh)
            increment_version(gate_up)  # Autograd refuses to read them as gate and up.
            dh = None
            dx, fc1_grad = backward_linear(first, fc1, saved[:2], gate_up, needs, amax)
        return dx, fc1_grad, fc2_grad, None, None, None


@eager
def lowbit_mlp(
    x: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    first: LinearContext,
    second: LinearContext,
    amax: Tensor | None = None,
) -> Tensor:
    """Compute ``(silu(gate) * up) @ fc2.T`` for ``gate, up = x @ fc1.T``, each in its precision.

    The result equals two calls of :func:`megatron_lowbit.layers.lowbit_linear` with SwiGLU between
    them, bit for bit. A second backward pass raises RuntimeError, also with
    ``retain_graph``.

    Args:
        x: (..., K), BF16 or FP32. Under sequence parallelism its first axis is this rank's part.
        fc1: (2 F, K), rows of the gate first.
        fc2: (N, F).
        first, second: contexts of both layers.
        amax: x's own, FP32 (), where it is known; the result is the same without.

    Returns:
        (..., N) of all tokens; under tensor parallelism a summand of each rank.
    """
    first, second = context_of(first, x), context_of(second, x)
    return by_rows(_LowbitMLP, x, first.shards, fc1, fc2, first, second, amax)
