"""Operands of a linear layer's GEMMs: input, weight and gradient, quantized for each GEMM."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.kernels.engine import Into
from megatron_lowbit.layers.context import LinearContext
from megatron_lowbit.layers.fallback import WithSource, without_source
from megatron_lowbit.layers.sharding import Shards, start_gather
from megatron_lowbit.numerics import Operand
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.plan import Saved, Source


def quantize_input(
    context: LinearContext,
    x: Tensor,
    operand: Operand | None,
    keep: bool,
    amax: Tensor | None = None,
) -> tuple[Callable[[], Any], Any]:
    """Quantize an input x (R, K) of this rank for fprop, and for wgrad if ``keep``.

    ``operand`` is x that is quantized already, ``amax`` x's own, where these are known.

    Returns:
        A function that returns fprop's input of all tokens, which are gathered until it is called;
        and what the plan saves of this rank's for wgrad: its transpose (K, R) quantized, fprop's
        codes (R, K), or x itself; None if none follows.
    """
    plan, split = context.plan(len(x)), context.shards.sequence_parallel
    fprop, wgrad = plan[Gemm.FPROP, Role.INPUT], plan[Gemm.WGRAD, Role.INPUT]
    row = Gemm.FPROP if fprop.gathers_codes or not split else None
    col = Gemm.WGRAD if keep and wgrad.saved is Saved.OPERAND else None
    given_row, given_col = (operand.row, operand.col) if operand else (None, None)
    row_left, col_left = (row if given_row is None else None, col if given_col is None else None)
    by_row, by_col = context.quantize(x, Role.INPUT, row_left, col_left, amax=amax)
    by_row = by_row if given_row is None else context.with_source(Gemm.FPROP, given_row, x)
    by_col = by_col if given_col is None else given_col
    tensors: dict[Saved | None, Any] = {
        Saved.OPERAND: by_col, Saved.FPROP: without_source(by_row), Saved.TENSOR: x,
    }  # fmt: skip
    saved = tensors[wgrad.saved] if keep else None
    if not split:
        return lambda: by_row, saved
    if row is None:
        gathered = start_gather(x, context.shards.group)
        return lambda: quantize_all_tokens(context, Gemm.FPROP, gathered()), saved
    return start_gather(by_row, context.shards.group), saved


def start_wgrad_input(context: LinearContext, saved: Any) -> Callable[[], Any]:
    """Start gathering what :func:`quantize_input` saved; return a function that waits for it.

    That returns wgrad's right operand of all tokens: the transpose (K, M), or fprop's own (M, K)
    where wgrad takes its values.
    """
    source, gathered = context.plan()[Gemm.WGRAD, Role.INPUT].source, None
    gemm = Gemm.WGRAD if source is Source.TENSOR else Gemm.FPROP
    if context.shards.sequence_parallel:
        by_rows = isinstance(saved, Tensor) or gemm == Gemm.FPROP
        gathered = start_gather(saved, context.shards.group, 0 if by_rows else 1)

    def wgrad_input() -> Any:
        operand = saved if gathered is None else gathered()
        if isinstance(operand, Tensor):
            operand = quantize_all_tokens(context, gemm, operand, gemm == Gemm.FPROP)
        if source is Source.REQUANTIZED:
            return requantized(context, Role.INPUT, operand)
        return operand

    return wgrad_input


def requantized(context: LinearContext, role: Role, operand: Any) -> Any:
    """Quantize the transpose of fprop's quantized weight or input, in BF16, along its own axis."""
    if role == Role.INPUT:
        context = _with_all_tokens(context)
    values = context.engine.dequantize(without_source(operand), torch.bfloat16)
    return context.quantize(values, role, None, Gemm.WGRAD if role == Role.INPUT else Gemm.DGRAD)[1]


def quantize_gathered(context: LinearContext, gemm: Gemm, x: Tensor) -> Any:
    """Gather x (R, K) in its own precision, then quantize the whole as an unsplit input."""
    if context.shards.sequence_parallel:
        x = start_gather(x, context.shards.group)()
    return quantize_all_tokens(context, gemm, x)


def quantize_all_tokens(
    context: LinearContext, gemm: Gemm, x: Tensor, needs_codes: bool = False
) -> Any:
    """Quantize the input of all tokens (M, K) as an unsplit one, right before its GEMM."""
    row, col = (Gemm.FPROP, None) if gemm == Gemm.FPROP else (None, gemm)
    both = _with_all_tokens(context).quantize(x, Role.INPUT, row, col, needs_codes)
    return both[0] if gemm == Gemm.FPROP else both[1]


def _with_all_tokens(context: LinearContext) -> LinearContext:
    """Return the context of a call with the input of all tokens, of which no codes are saved."""
    shards = context.shards
    if shards.sequence_parallel:
        shards = replace(shards, sequence_parallel=False, roles=shards.roles - {Role.INPUT})
    return replace(context, shards=shards, saves_input=True)


def quantize_weight(
    context: LinearContext,
    weight: Callable[[], Any],
    quantize: Callable[..., tuple[Any, Any]] | None = None,
) -> tuple[Any, Any]:
    """Quantize a weight (N, K) for fprop, and its transpose for dgrad; return both operands.

    ``weight`` returns it, where it is not in the cache; ``quantize`` takes the place of the
    context's, for the weights of experts. Dgrad's is None where backward quantizes it, and fprop's
    own (N, K) where dgrad takes its values.
    """
    dgrad = context.plan()[Gemm.DGRAD, Role.WEIGHT]
    cache = context.weight_cache if context.precision.caches_weight else None
    if cache is not None and cache.operands is not None:
        return cache.operands
    col = Gemm.DGRAD if dgrad.saved is Saved.OPERAND else None
    quantize = quantize or context.quantize
    by_row, by_col = quantize(weight(), Role.WEIGHT, Gemm.FPROP, col)
    tensors: dict[Saved | None, Any] = {Saved.OPERAND: by_col, Saved.FPROP: by_row}
    dgrad_weight = without_source(tensors.get(dgrad.saved))
    if cache is not None and context.training:
        cache.operands = by_row, dgrad_weight
    return by_row, dgrad_weight


def quantize_dgrad_weight(context: LinearContext, weight: Tensor, saved: Any = None) -> Any:
    """Return dgrad's weight (K, N): what forward saved, or else the transpose, quantized now.

    It is fprop's own (N, K) where dgrad takes its values.
    """
    if saved is not None:
        # Codes may have taken the memory of a weight that no fallback needs.
        return WithSource(saved, weight.t()) if context.precision.dgrad.keeps_sources else saved
    source = context.plan()[Gemm.DGRAD, Role.WEIGHT].source
    if source in (Source.DEQUANTIZED, Source.REQUANTIZED):
        by_row, _ = context.quantize(weight, Role.WEIGHT, Gemm.FPROP, None, needs_codes=True)
        return by_row if source is Source.DEQUANTIZED else requantized(context, Role.WEIGHT, by_row)
    return context.quantize(weight, Role.WEIGHT, None, Gemm.DGRAD)[1]


def quantize_grad(
    context: LinearContext,
    grad: Tensor,
    needs_dgrad: bool,
    needs_wgrad: bool,
    amax: Tensor | None = None,
) -> tuple[Any, Any]:
    """Quantize dY (M, N) for dgrad, and its transpose for wgrad; ``amax`` is its own, if known."""
    row, col = Gemm.DGRAD if needs_dgrad else None, Gemm.WGRAD if needs_wgrad else None
    if needs_wgrad and context.plan()[Gemm.WGRAD, Role.GRAD].source is Source.DEQUANTIZED:
        by_row, _ = context.quantize(grad, Role.GRAD, Gemm.DGRAD, None, amax=amax)
        codes = without_source(by_row)
        if context.precision.wgrad.dequantizes:  # in FP32, even if the gradient is exact in BF16
            return by_row, context.engine.dequantize(codes, torch.float32).t()
        return by_row, context.engine.transpose(codes, codes)
    return context.quantize(grad, Role.GRAD, row, col, amax=amax)


def reduce_dgrad(shards: Shards, dgrad: Tensor) -> tuple[Tensor, dist.Work | None]:
    """Start summing dX over the group, to run while wgrad computes."""
    if shards.sequence_parallel:
        local = dgrad.new_empty(
            (dgrad.shape[0] // dist.get_world_size(shards.group), dgrad.shape[1])
        )
        return local, dist.reduce_scatter_tensor(local, dgrad, group=shards.group, async_op=True)
    if shards.allreduce_dgrad:
        return dgrad, dist.all_reduce(dgrad, group=shards.group, async_op=True)
    return dgrad, None


def main_grad_of(context: LinearContext, weight: Tensor) -> Into:
    """Return the weight's main gradient (N, K), and True to add to it; None if autograd adds dW.

    Megatron-FSDP makes it on demand, and wants dW written. The first dW of a step is written too:
    reading what DistributedDataParallel has set to zero can take a third of the GEMM's time.
    """
    if not context.accumulate_main_grad:
        return None
    make = getattr(weight, "get_main_grad", None)
    sums: Tensor | None = make() if make else getattr(weight, "main_grad", None)
    if sums is None:
        return None
    if getattr(weight, "overwrite_main_grad", False):
        return sums, False
    if context.main_grad_beta is not None:
        return sums, context.main_grad_beta
    return sums, getattr(weight, "grad_added_to_main_grad", True)


def added_to_main_grads(weights: Sequence[Tensor]) -> list[Tensor]:
    """Mark that dW of weights of one shape is in ``main_grad``; return what autograd takes instead.

    Autograd discards it, so that all share the memory.
    """
    zeros = getattr(weights[0], "zero_out_wgrad", False)
    placeholder_grad = (torch.zeros_like if zeros else torch.empty_like)(weights[0])
    for weight in weights:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Tensors of their own: autograd copies one that others hold.
    return [placeholder_grad.detach() for _ in weights]
