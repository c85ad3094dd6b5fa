"""Linear layers of a mixture of experts, each applied to the tokens that are routed to it.

Experts of one precision are quantized together: one launch for the tokens of all, one for their
weights, one for the gradients. The bits are those of a linear layer for each expert.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lowbit.layers import operands
from megatron_lowbit.layers.autograd_state import flatten, unflatten
from megatron_lowbit.layers.context import LinearContext, quantize_all
from megatron_lowbit.layers.linear import context_of, lowbit_linear


def lowbit_grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    contexts: Sequence[LinearContext | None],
    tokens_per_expert: Sequence[int],
    biases: Sequence[Tensor | None],
) -> Tensor:
    """Compute ``x_e @ weight_e.T + bias_e`` for the tokens of each expert e.

    Args:
        x: (T, K), FP32 or BF16, one expert's tokens after another's.
        weights: (N, K) of each expert.
        contexts: precision and state of each expert's call; None for high precision.
        tokens_per_expert: their numbers, of sum T. An expert without tokens has nothing to
            quantize, and no amax to record.
        biases: (N,) of each expert, or None.

    Returns:
        (T, N) in x's dtype.
    """
    tokens = list(tokens_per_expert)
    if len(x) and _are_alike(contexts) and not any(bias is not None for bias in biases):
        known = [context_of(context, x) for context in contexts if context is not None]
        y: Tensor = _GroupedLinear.apply(x, tokens, known, *weights)  # type: ignore[no-untyped-call]
        return y
    products = []
    for part, weight, context, bias in zip(x.split(tokens), weights, contexts, biases, strict=True):
        if context is None or not len(part):
            products.append(F.linear(part, weight, bias))
        else:
            products.append(lowbit_linear(part, weight, context, bias))
    return torch.cat(products)


def _are_alike(contexts: Sequence[LinearContext | None]) -> bool:
    """Return True if experts are of one precision, whose operands are all quantized anew."""
    first = contexts[0]
    if first is None:
        return False
    precision = first.precision
    alike = all(context is not None and context.precision == precision for context in contexts)
    return alike and not precision.shares_operands and not precision.falls_back


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tokens: list[int], contexts: list[LinearContext], *weights: Tensor
    ) -> Tensor:
        ctx.active = [expert for expert, count in enumerate(tokens) if count]
        active = [contexts[expert] for expert in ctx.active]
        trains = active[0].training
        keeps = trains and any(weight.requires_grad for weight in weights)
        parts, col = _parts(x, tokens), "wgrad" if keeps else None
        inputs, kept = quantize_all(active, parts, "input", "fprop", col, saved={"wgrad"})
        by_row, by_col = _quantize_weights(active, [weights[expert] for expert in ctx.active])
        products = zip(active, inputs, by_row, strict=True)
        y = torch.cat([c.gemm("fprop", lhs, rhs, x.dtype) for c, lhs, rhs in products])
        saved = kept if keeps else None, by_col if trains and x.requires_grad else None
        tensors: list[Tensor] = []
        ctx.saved = [flatten(part, tensors) for part in saved]
        ctx.save_for_backward(*tensors)
        ctx.tokens, ctx.contexts, ctx.weights = tokens, contexts, weights
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        active = [ctx.contexts[expert] for expert in ctx.active]
        tensors = iter(ctx.saved_tensors)
        kept, dgrad_weights = (unflatten(part, tensors) for part in ctx.saved)
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        row, col = "dgrad" if needs_dgrad else None, "wgrad" if needs_wgrad else None
        by_row, by_col = quantize_all(active, _parts(grad, ctx.tokens), "grad", row, col)
        dgrad = None
        if needs_dgrad:
            if dgrad_weights is None:
                weights = [ctx.weights[expert] for expert in ctx.active]
                _, dgrad_weights = quantize_all(active, weights, "weight", None, "dgrad")
            products = zip(active, by_row, dgrad_weights, strict=True)
            dgrad = torch.cat([c.gemm("dgrad", lhs, rhs, grad.dtype) for c, lhs, rhs in products])
        wgrads: list[Tensor | None] = [None] * len(ctx.weights)
        if needs_wgrad:
            pairs = dict(zip(ctx.active, zip(by_col, kept, strict=True), strict=True))
            for expert, (context, weight) in enumerate(zip(ctx.contexts, ctx.weights, strict=True)):
                product = partial(_wgrad, context, weight, pairs.get(expert))
                wgrads[expert] = operands.deliver_wgrad(context, weight, product)
        return dgrad, None, None, *wgrads


def _parts(x: Tensor, tokens: list[int]) -> list[Tensor]:
    """Return the tokens of each expert that has any."""
    return [part for part in x.split(tokens) if len(part)]


def _quantize_weights(
    contexts: list[LinearContext], weights: list[Tensor]
) -> tuple[list[Any], list[Any] | None]:
    """Quantize weights (N, K) for fprop, and their transposes for dgrad; None if backward does.

    Those that are in their contexts' caches are taken from there.
    """
    precision, trains = contexts[0].precision, contexts[0].training
    caches = [context.weight_cache if precision.caches_weight else None for context in contexts]
    found = [cache.operands if cache is not None else None for cache in caches]
    missing = [number for number, pair in enumerate(found) if pair is None]
    wanted = operands.weight_sides(contexts[0])
    if missing:
        by_row, by_col = quantize_all(
            [contexts[number] for number in missing],
            [weights[number] for number in missing],
            "weight", "fprop", wanted.dgrad, wanted.needs_codes, wanted.saved,
        )  # fmt: skip
        by_col = by_col if wanted.dgrad else [None] * len(missing)
        for number, *pair in zip(missing, by_row, by_col, strict=True):
            found[number] = (pair[0], pair[1])
            cache = caches[number]
            if cache is not None and trains:
                cache.operands = found[number]
    rows, cols = zip(*(pair for pair in found if pair is not None), strict=True)
    return list(rows), list(cols) if all(col is not None for col in cols) else None


def _wgrad(
    context: LinearContext,
    weight: Tensor,
    pair: tuple[Any, Any] | None,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """Compute dW (N, K), or add it to ``out``; zeros for an expert without tokens."""
    if pair is not None:
        return context.gemm("wgrad", *pair, dtype, out=out)
    return weight.new_zeros(weight.shape, dtype=dtype) if out is None else out
