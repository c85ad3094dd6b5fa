"""Operands of a linear layer's GEMMs: input, weight and gradient, quantized for each GEMM."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.layers.context import LinearContext
from megatron_lowbit.layers.sharding import Shards, gather_rows, start_columns, start_rows
from megatron_lowbit.numerics import Operand, QuantizedTensor
from megatron_lowbit.numerics.gemms import Gemm, Role


def quantize_input(
    context: LinearContext, x: Tensor, operand: Operand | None, keep: bool
) -> tuple[Callable[[], Any], Any]:
    """Quantize an input for fprop, and for wgrad if ``keep``.

    Tokens that sequence parallelism splits are gathered as codes where blocks stay whole, else in
    their own precision.

    Args:
        context: of the call.
        x: this rank's input (R, K).
        operand: x that is quantized already, or None.
        keep: True if wgrad follows.

    Returns:
        A function that returns fprop's input of all tokens, which are gathered until it is called;
        and what wgrad keeps of this rank's: its transpose (K, R) quantized; fprop's codes (R, K)
        where wgrad is made from them; x itself where the context says so, and where wgrad is in
        high precision, has a fallback, or quantizes the tokens of all ranks; else None.
    """
    precision, tokens = context.precision, x.shape[0]
    split = context.shards.sequence_parallel
    given_row, given_col = (operand.row, operand.col) if operand else (None, None)
    makes_codes = keep and not context.saves_input
    reuses_row = makes_codes and precision.wgrad.uses_fprop
    keeps_codes = (
        makes_codes
        and not reuses_row
        and not precision.wgrad.fallback
        and precision.quantizer(Gemm.WGRAD, Role.INPUT) is not None
        and (given_col is not None or not split or precision.gathers_codes(Gemm.WGRAD, tokens))
    )
    makes_row = given_row is None and (not split or precision.gathers_codes(Gemm.FPROP, tokens))
    makes_col = keeps_codes and given_col is None
    needs_codes = {Gemm.WGRAD, Gemm.FPROP} if split or reuses_row else ()
    row, col = Gemm.FPROP if makes_row else None, Gemm.WGRAD if makes_col else None
    by_row, by_col = context.quantize(x, Role.INPUT, row, col, needs_codes, saved={Gemm.WGRAD})
    by_row = by_row if given_row is None else given_row
    if reuses_row:
        saved = by_row
    elif keeps_codes:
        saved = by_col if given_col is None else given_col
    else:
        saved = x if keep else None
    if not split:
        return lambda: by_row, saved
    if given_row is None and not makes_row:
        whole = start_rows(x, context.shards.group)
        return lambda: quantize_all_tokens(context, Gemm.FPROP, whole()), saved
    return start_rows(by_row, context.shards.group), saved


def start_saved(context: LinearContext, saved: Any) -> Callable[[], Any]:
    """Start gathering what :func:`quantize_input` saved; return a function that waits for it."""
    if not context.shards.sequence_parallel:
        return lambda: saved
    by_rows = isinstance(saved, Tensor) or context.precision.wgrad.uses_fprop
    return (start_rows if by_rows else start_columns)(saved, context.shards.group)


def wgrad_input(context: LinearContext, saved: Any) -> Any:
    """Return wgrad's right operand from what :func:`quantize_input` saved, of all tokens.

    It is transposed, (K, M); fprop's own (M, K) where wgrad takes its values.
    """
    precision = context.precision.wgrad
    if isinstance(saved, Tensor):
        gemm = Gemm.FPROP if precision.uses_fprop else Gemm.WGRAD
        saved = quantize_all_tokens(context, gemm, saved)
    return requantized(context, Role.INPUT, saved) if precision.requantizes_rhs else saved


def requantized(context: LinearContext, role: Role, operand: QuantizedTensor) -> Any:
    """Quantize the transpose of fprop's quantized weight or input, in BF16, along its own axis."""
    if role == Role.INPUT:
        context = _without_split_tokens(context)
    values = context.engine.dequantize(operand, torch.bfloat16)
    return context.quantize(values, role, None, Gemm.WGRAD if role == Role.INPUT else Gemm.DGRAD)[1]


def gather_input(context: LinearContext, x: Tensor) -> Tensor:
    """Return the input of all tokens in its own precision, of this rank's x (R, K)."""
    return gather_rows(x, context.shards.group) if context.shards.sequence_parallel else x


def quantize_gathered(context: LinearContext, gemm: Gemm, x: Tensor) -> Any:
    """Gather x (R, K) in its own precision, then quantize the whole as an unsplit input."""
    return quantize_all_tokens(context, gemm, gather_input(context, x))


def quantize_all_tokens(context: LinearContext, gemm: Gemm, x: Tensor) -> Any:
    """Quantize the input of all tokens (M, K) as an unsplit one."""
    needs_codes = {gemm} if context.precision.wgrad.uses_fprop else ()
    row, col = (Gemm.FPROP, None) if gemm == Gemm.FPROP else (None, gemm)
    both = _without_split_tokens(context).quantize(x, Role.INPUT, row, col, needs_codes)
    return both[0] if gemm == Gemm.FPROP else both[1]


def _without_split_tokens(context: LinearContext) -> LinearContext:
    """Return the context of a call with the input of all tokens."""
    if not context.shards.sequence_parallel:
        return context
    roles = context.shards.roles - {Role.INPUT}
    return replace(context, shards=replace(context.shards, sequence_parallel=False, roles=roles))


def quantize_weight(context: LinearContext, weight: Callable[[], Tensor]) -> tuple[Any, Any]:
    """Quantize a weight (N, K) for fprop, and its transpose for dgrad.

    Args:
        context: of the call.
        weight: returns the weight, where it is not in the cache.

    Returns:
        Both operands. Dgrad's is None where backward quantizes it, and fprop's own (N, K) where
        dgrad takes its values.
    """
    precision = context.precision
    cache = context.weight_cache if precision.caches_weight else None
    if cache is not None and cache.operands is not None:
        return cache.operands
    wanted = weight_sides(context)
    sides = wanted.dgrad, wanted.needs_codes, wanted.saved
    by_row, by_col = context.quantize(weight(), Role.WEIGHT, Gemm.FPROP, *sides)
    dgrad_weight = None if wanted.dgrad is None else by_col
    if context.training and precision.dgrad.rhs_of_fprop and not precision.weight_serves_dgrad:
        dgrad_weight = by_row
    if cache is not None and context.training:
        cache.operands = by_row, dgrad_weight
    return by_row, dgrad_weight


def versions_of(weights: Sequence[Tensor]) -> list[int]:
    """Return how often each weight was changed in place, for :func:`check_versions`.

    Weights are not saved for backward as autograd saves tensors: hooks on saved tensors would copy
    them in high precision, although most GEMMs take codes.
    """
    return [weight._version for weight in weights]


def check_versions(weights: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raise RuntimeError for a weight that has changed since forward, as autograd does."""
    for weight, version in zip(weights, versions, strict=False):
        if weight._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a weight {tuple(weight.shape)} of a quantized linear layer is "
                f"at version {weight._version}; expected version {version} instead"
            )


class WeightSides(NamedTuple):
    """Quantization of a weight beside fprop's side, as arguments of ``LinearContext.quantize``.

    ``dgrad`` names the GEMM of its transpose, None where backward quantizes it.
    """

    dgrad: Gemm | None
    needs_codes: Collection[str]
    saved: Collection[str]


def weight_sides(context: LinearContext) -> WeightSides:
    """Return how forward quantizes a weight."""
    precision, training = context.precision, context.training
    shared, reused = precision.weight_serves_dgrad, precision.dgrad.uses_fprop
    dgrad = None
    if training and shared:
        dgrad = Gemm.FPROP
    elif training and precision.caches_weight and not reused and precision.dgrad.rhs is not None:
        dgrad = Gemm.DGRAD
    needs_codes = {Gemm.FPROP, Gemm.DGRAD} if precision.dgrad.rhs_of_fprop else ()
    saved = {Gemm.FPROP, Gemm.DGRAD} if shared or precision.caches_weight else ()
    return WeightSides(dgrad, needs_codes, saved)


def quantize_dgrad_weight(context: LinearContext, weight: Tensor) -> Any:
    """Quantize the transpose of a weight (N, K) in backward; itself where dgrad takes fprop's."""
    precision = context.precision
    if precision.dgrad.uses_fprop and not precision.weight_serves_dgrad:
        by_row, _ = context.quantize(weight, Role.WEIGHT, Gemm.FPROP, None, {Gemm.FPROP})
        return (
            requantized(context, Role.WEIGHT, by_row) if precision.dgrad.requantizes_rhs else by_row
        )
    return context.quantize(weight, Role.WEIGHT, None, Gemm.DGRAD)[1]


def quantize_grad(
    context: LinearContext, grad: Tensor, needs_dgrad: bool, needs_wgrad: bool
) -> tuple[Any, Any]:
    """Quantize dY (M, N) for dgrad, and its transpose for wgrad."""
    if needs_wgrad and context.precision.wgrad.lhs_of_dgrad:
        by_row, _ = context.quantize(grad, Role.GRAD, Gemm.DGRAD, None, needs_codes={Gemm.DGRAD})
        return by_row, context.engine.transpose(by_row, by_row)
    row, col = Gemm.DGRAD if needs_dgrad else None, Gemm.WGRAD if needs_wgrad else None
    return context.quantize(grad, Role.GRAD, row, col)


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


def accumulate_wgrad_into(
    context: LinearContext,
    weight: Tensor,
    wgrad: Callable[[torch.dtype, Tensor | None, bool | Tensor], Tensor],
) -> Tensor:
    """Add dW to ``weight.main_grad`` and return a stand-in, or return dW for autograd to add.

    ``wgrad`` computes dW in a dtype, and writes or adds it to a tensor unless that is None.
    """
    main_grad = main_grad_of(context, weight)
    if main_grad is None:
        return wgrad(weight.dtype, None, False)
    wgrad(torch.float32, *main_grad)
    return added_to_main_grad(weight)


class MainGrad(NamedTuple):
    """Main gradient (N, K) of a weight; ``beta`` is as for :meth:`Engine.product_to`."""

    sums: Tensor
    beta: bool | Tensor


def main_grad_of(context: LinearContext, weight: Tensor) -> MainGrad | None:
    """Return the weight's main gradient; None where autograd adds dW.

    Megatron-FSDP makes it on demand, and wants dW written. The first dW of a step is written too:
    reading what DistributedDataParallel has set to zero can take a third of the GEMM's time.
    """
    if not context.accumulate_main_grad:
        return None
    made = getattr(weight, "get_main_grad", None)
    sums: Tensor | None = made() if made else getattr(weight, "main_grad", None)
    if sums is None:
        return None
    if getattr(weight, "overwrite_main_grad", False):
        return MainGrad(sums, False)
    if context.main_grad_beta is not None:
        return MainGrad(sums, context.main_grad_beta)
    return MainGrad(sums, getattr(weight, "grad_added_to_main_grad", True))


def added_to_main_grad(weight: Tensor) -> Tensor:
    """Mark that dW is in ``weight.main_grad``; return what autograd takes in its place."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    placeholder_grad = (
        torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    )
    return placeholder_grad(weight)


def added_to_main_grads(weights: Sequence[Tensor]) -> list[Tensor]:
    """Mark experts' weights of one shape in the same way; what is returned shares its memory.

    Autograd discards it.
    """
    placeholder_grad = added_to_main_grad(weights[0])
    for weight in weights[1:]:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Tensors of their own: autograd copies one that others hold.
    return [placeholder_grad.detach() for _ in weights]
