"""Linear layers of a mixture of experts, each applied to the tokens that are routed to it.

Experts of one precision, which may be BF16, are computed together: one launch quantizes the tokens
of all, one their weights, one the gradients, and each GEMM is one launch. Quantized bits are the
same as in a linear layer for each expert; products differ only by the order of sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.kernels.split import DeviceRows, Rows, RowSlices, rows_of, transposes_of
from megatron_lowbit.layers import operands
from megatron_lowbit.layers.autograd_state import (
    once_differentiable,
    restore,
    save,
    without_autocast,
)
from megatron_lowbit.layers.context import LinearContext
from megatron_lowbit.layers.counts import (
    DeviceCounts,
    Permutation,
    TokensPerExpert,
    counts_on_host,
    permutation_of,
    permuted,
)
from megatron_lowbit.layers.linear import context_of, lowbit_linear
from megatron_lowbit.numerics import Operand, QuantizedTensor, Requests, Rounding
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm, Role
from megatron_lowbit.numerics.plan import Source
from megatron_lowbit.numerics.randomness import Key, operand_key, sign_key


@dataclass(frozen=True)
class GroupContext:
    """Context of a call of several linear layers, which differ only in their keys.

    ``context`` is of one of them; its weight cache keeps the weights of all. ``keys`` are of each;
    empty where the precision draws no random bits.
    """

    context: LinearContext
    keys: Sequence[Key] = ()

    def quantize(
        self, xs: Sequence[Tensor], role: Role, row: Gemm | None, col: Gemm | None
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Quantize each layer's x (R, C), as :meth:`LinearContext.quantize` does."""
        rows = self._requests(row, role)
        plan = self.context.plan()
        serves = rows and col and plan[col, role].source is Source.TRANSPOSE
        cols = rows if serves else self._requests(col, role)
        left = right = None
        if rows is not None or cols is not None:
            left, right = self.context.engine.quantize_all(xs, rows, cols)
        return xs if left is None else left, transposes_of(xs) if right is None else right

    @property
    def requantizes(self) -> bool:
        """True if wgrad's input is made from fprop's codes."""
        return self.context.precision.wgrad.requantizes_rhs

    def fprop_inputs(
        self, xs: RowSlices, codes: QuantizedTensor | None, keep: bool
    ) -> tuple[Sequence[Any], Any]:
        """Return each layer's x (R, K) for fprop, or its codes of all; and what wgrad keeps.

        A wgrad that requantizes keeps codes: of all rows at once where rows do not share scales.
        """
        if not self.requantizes:
            return self.quantize(xs, Role.INPUT, Gemm.FPROP, Gemm.WGRAD if keep else None)
        request = self.context.request(Gemm.FPROP, Role.INPUT, 0, needs_codes=True)
        independent = request is not None and request.quantizer.rows_are_independent
        if codes is None and independent:
            x = xs.matrix
            codes, _ = self.context.quantize(x, Role.INPUT, Gemm.FPROP, None, needs_codes=True)
        if request is None or codes is None:
            inputs, _ = self.quantize(xs, Role.INPUT, Gemm.FPROP, None)
            return inputs, inputs
        return self.context.engine.split_rows(codes, xs.rows, request), codes

    def wgrad_inputs(self, kept: Any, rows: Rows) -> Sequence[Any]:
        """Return each layer's input for wgrad, requantized as in :func:`operands.requantized`."""
        if not self.requantizes:
            return kept  # type: ignore[no-any-return]
        decode = self.context.engine.dequantize
        if isinstance(kept, QuantizedTensor):
            values: Sequence[Tensor] = RowSlices(decode(kept, torch.bfloat16), rows)
        else:
            values = [decode(codes, torch.bfloat16) for codes in kept]
        return self.quantize(values, Role.INPUT, None, Gemm.WGRAD)[1]

    def _requests(self, gemm: Gemm | None, role: Role) -> Requests | None:
        """Return the requests for an operand; None for no operand, or one in high precision."""
        if gemm is None:
            return None
        # Rows count from zero: experts' tokens are not split by sequence parallelism.
        template = self.context.request(gemm, role, 0)
        if template is None:
            return None
        draw_keys: Sequence[Key] = ()
        signs: Sequence[Key] = ()
        if template.quantizer.rounding is Rounding.STOCHASTIC:
            draw_keys = [operand_key(key, gemm, role) for key in self.keys]
        if template.hadamard is not None and template.hadamard.signs == "fresh":
            signs = [sign_key(key, gemm) for key in self.keys]
        return Requests(template, draw_keys, signs)

    def multiply(
        self,
        gemm: Gemm,
        lhs: Sequence[Any],
        rhs: Sequence[Any],
        outs: Sequence[Tensor],
        beta: bool = False,
    ) -> None:
        """Write one of the three products of each layer to its out, or add it to that."""
        precision, engine = self.context.precision.gemms[gemm], self.context.engine
        engine.gemm_all(lhs, rhs, outs, beta, precision.accumulation, precision.folding)


def can_group(context: LinearContext) -> bool:
    """Return True if layers of a context's precision can be quantized and multiplied together.

    Each operand is quantized from its tensor, by scales of each layer's own, with known keys; or
    wgrad's input is requantized from fprop's.
    """
    precision = context.precision
    shares = precision.dgrad.uses_fprop or precision.wgrad.rhs_of_fprop
    return (
        not (shares or precision.wgrad.lhs_of_dgrad)
        and not precision.keeps_sources
        and not isinstance(context.key, Tensor)
        and not any(context.shares_amax(side.gemm, side.role) for side in precision.operands())
    )


def counts_on_device(context: LinearContext, weights: Sequence[Tensor], rows: int) -> bool:
    """Return True if experts' numbers of tokens need not be known on the host.

    ``context`` is of one of the experts, for which :func:`can_group` is true, ``weights`` (N, K)
    are of each, whose tokens have the dtype, and ``rows`` is the number of all tokens.
    """
    precision, plan, pairs = context.precision, context.plan(), []
    for gemm, roles in GEMM_ROLES.items():
        plans = [plan[gemm, role] for role in roles]
        left, right = (
            precision.request(gemm, role, own.codes, own.stays)
            for role, own in zip(roles, plans, strict=True)
        )
        pairs.append((left, right, precision.gemms[gemm].folding))
    emulates = any(gemm.accumulation is not None for gemm in precision.gemms.values())
    # Of layers that are split, random bits have numbers of other ranks' rows.
    if emulates or context.shards.roles or precision.shares_operands:
        return False
    return context.engine.takes_counts(pairs, weights, rows)


def quantizes_input(context: LinearContext) -> bool:
    """Return True if no product takes the input in high precision."""
    gemms = Gemm.FPROP, Gemm.WGRAD
    return all(context.precision.quantizer(gemm, Role.INPUT) is not None for gemm in gemms)


def lowbit_grouped_linear(
    x: Tensor | Operand,
    weights: Sequence[Tensor],
    contexts: GroupContext | Sequence[LinearContext | None],
    tokens_per_expert: TokensPerExpert,
    biases: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Compute ``x_e @ weight_e.T + bias_e`` for the tokens of each expert e.

    Args:
        x: (T, K), FP32 or BF16, one expert's tokens after another's; or (T0, K), all tokens, which
            are quantized in the order of a permutation. Fprop's codes that come with it are taken
            in place of its values.
        weights: (N, K) of each expert.
        contexts: one for all experts together, which have no biases then; or one for each expert,
            None for high precision.
        tokens_per_expert: their numbers, of sum T. An expert without tokens has nothing to
            quantize, and no amax to record. The host waits for those on the device unless
            :func:`counts_on_device`.
        biases: (N,) of each expert, or None; None for no biases.

    Returns:
        (T, N) in x's dtype.

    Raises:
        ValueError: x comes with codes for experts one by one, or whose wgrad does not requantize.
    """
    x, codes = (x.source, x.row) if isinstance(x, Operand) else (x, None)
    if codes is not None and not (isinstance(contexts, GroupContext) and contexts.requantizes):
        raise ValueError("x: codes need one context, with wgrad.input.requantize")
    if isinstance(contexts, GroupContext):
        context = context_of(contexts.context, x)
        group = replace(contexts, context=context)
        values, rows, permutation = _source(x, tokens_per_expert, context, weights)
        y: Tensor = _GroupedLinear.apply(values, codes, rows, permutation, group, *weights)  # type: ignore[no-untyped-call]
        return y
    parts = permuted(x, tokens_per_expert).split(counts_on_host(tokens_per_expert))
    products, biases = [], biases or [None] * len(weights)
    for part, weight, one, bias in zip(parts, weights, contexts, biases, strict=True):
        if one is None or not len(part):
            products.append(F.linear(part, weight, bias))
        else:
            products.append(lowbit_linear(part, weight, one, bias))
    return torch.cat(products)


def _source(
    x: Tensor, tokens: TokensPerExpert, context: LinearContext, weights: Sequence[Tensor]
) -> tuple[Tensor, Rows, Permutation | None]:
    """Return the input, the numbers of its rows and its permutation, which needs device counts.

    The numbers are on the device where they need not be known on the host.
    """
    if isinstance(tokens, DeviceCounts) and counts_on_device(context, weights, tokens.rows):
        # A CUDA graph may write others there before the backward pass.
        rows: Rows = DeviceRows(tokens.counts.clone(), tokens.rows)
        if quantizes_input(context):
            return x, rows, permutation_of(x, tokens)
    else:
        rows = rows_of(tuple(counts_on_host(tokens)))
    return permuted(x, tokens), rows, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        codes: QuantizedTensor | None,
        tokens: Rows,
        permutation: Permutation | None,
        group: GroupContext,
        *weights: Tensor,
    ) -> Tensor:
        xs = RowSlices(x, tokens, None if permutation is None else permutation.tokens)
        trains = group.context.training
        keeps = trains and any(weight.requires_grad for weight in weights)
        inputs, kept = group.fprop_inputs(xs, codes, keeps)
        by_row, by_col = operands.quantize_weight(group.context, lambda: weights, group.quantize)
        y = x.new_empty(tokens.in_units(1).total, len(weights[0]))
        group.multiply(Gemm.FPROP, inputs, by_row, RowSlices(y, tokens))
        needs_dgrad = trains and x.requires_grad
        saved = kept if keeps else None, by_col if needs_dgrad else None
        save(ctx, saved, weights if needs_dgrad else [])
        ctx.tokens, ctx.permutation, ctx.group, ctx.weights = tokens, permutation, group, weights
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, tokens, weights = ctx.group, ctx.tokens, ctx.weights
        kept, dgrad_weights = restore(ctx)
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:])
        row, col = Gemm.DGRAD if needs_dgrad else None, Gemm.WGRAD if needs_wgrad else None
        by_row, by_col = group.quantize(RowSlices(grad, tokens), Role.GRAD, row, col)
        dgrad = None
        if needs_dgrad:
            if dgrad_weights is None:
                _, dgrad_weights = group.quantize(weights, Role.WEIGHT, None, Gemm.DGRAD)
            dgrad = grad.new_empty(len(grad), weights[0].shape[1])
            group.multiply(Gemm.DGRAD, by_row, dgrad_weights, RowSlices(dgrad, tokens))
            by_row = dgrad_weights = None
            if ctx.permutation is not None:
                dgrad = ctx.permutation.sum_by_token(dgrad)
        wgrads: Sequence[Tensor | None] = [None] * len(weights)
        if needs_wgrad:
            wgrads = _accumulate_wgrads(group, by_col, group.wgrad_inputs(kept, tokens), weights)
        return dgrad, None, None, None, None, *wgrads


def _accumulate_wgrads(
    group: GroupContext, lhs: Sequence[Any], rhs: Sequence[Any], weights: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Add each dW (N, K) to its ``main_grad`` and return placeholders, or return each dW."""
    main_grads = [operands.main_grad_of(group.context, weight) for weight in weights]
    known = [main_grad for main_grad in main_grads if main_grad is not None]
    if len(known) == len(weights):
        sums, betas = zip(*known, strict=True)
        group.multiply(Gemm.WGRAD, lhs, rhs, sums, any(betas))
        return operands.added_to_main_grads(weights)
    wgrads = weights[0].new_empty(len(weights), *weights[0].shape).unbind()
    group.multiply(Gemm.WGRAD, lhs, rhs, wgrads)
    return wgrads
