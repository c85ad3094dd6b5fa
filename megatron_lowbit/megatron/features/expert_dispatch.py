"""Tokens sent to experts of other ranks as fprop's codes: ``--quantized-expert-dispatch``.

Megatron-LM exchanges the experts' input in BF16, and the experts quantize it. Here each rank
quantizes what it sends, and codes and scales are exchanged. They are the same bits where scales lie
within a token. Wgrad's input is made from them, as the recipe has to say. Gradients go back in the
tokens' dtype.

Source: the dispatch in FP8 of "DeepSeek-V3 Technical Report" (arXiv 2412.19437) and "FP8-Flow-MoE"
(arXiv 2511.02302).
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lowbit.errors import require
from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.layers.grouped import can_group
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.megatron.layers.state import LayerState
from megatron_lowbit.numerics import QuantizedTensor
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.quantizer import as_bytes
from megatron_lowbit.recipes import Layer, LinearPrecision

FLAG = "--quantized-expert-dispatch"
_FC1 = re.compile(r"(.*\.experts)\.local_experts\.\d+\.linear_fc1$")


class ExpertDispatch(Feature):
    """Dispatchers of this rank's chunks that send codes where the experts' input is quantized."""

    argument = "quantized_expert_dispatch"

    def check(self, layers: Sequence[Layer]) -> None:
        """Raise UserError unless all experts of a layer take codes, or none does, at any time."""
        sends = False
        for _, recipe in self.run.recipe.phases():
            precisions: dict[str, LinearPrecision] = {}
            for layer in layers:
                if (match := _FC1.match(layer.path)) is None:
                    continue
                where = f"{FLAG}: recipe {recipe.name}, {layer.path}"
                precision = recipe.precision_for(layer)
                require(
                    precisions.setdefault(match[1], precision) == precision,
                    f"{where}: other experts of the layer have another precision; give them one",
                )
                if precision.fprop.lhs is not None:
                    sends, reason = True, obstacle(precision, self.run.engine)
                    require(reason is None, f"{where}: {reason}")
        require(sends, f"{FLAG} has no effect: the recipe quantizes fprop's input of no expert")

    def install(self) -> None:
        """Replace methods of the dispatchers."""
        for chunk in self.run.chunks:
            for module in chunk.modules():
                if isinstance(module, MoELayer):
                    _CodesDispatch(module.token_dispatcher, module.experts.linear_fc1)


def obstacle(precision: LinearPrecision, engine: Engine) -> str | None:
    """Return the reason why experts cannot take fprop's quantized input as codes, or None."""
    quantizer = precision.fprop.lhs
    if not quantizer.rows_are_independent:
        return (
            "fprop.input has a tensor scale, or codes that depend on several tokens; use a format "
            "whose scales lie within a token, such as fp8-1x128-e4m3, rounding nearest and no "
            "split_mean"
        )
    if not precision.wgrad.requantizes_rhs:
        return (
            "wgrad.input is made from values that are not sent; add --recipe-set "
            "wgrad.input.requantize=true"
        )
    if not can_group(LinearContext(precision, engine, key=0)):
        return (
            "its experts are computed one by one; omit amax_history, fallback, hot_channels, "
            "requantize of weights, and axis fprop or dgrad"
        )
    return None


class _CodesDispatch:
    """Exchange of a layer's tokens as codes, by methods in place of its token dispatcher's.

    The layer's experts are on several ranks; ``fc1`` is the grouped linear layer that takes the
    tokens.
    """

    def __init__(self, dispatcher: MoEAlltoAllTokenDispatcher, fc1: torch.nn.Module) -> None:
        self.dispatcher, self.fc1 = dispatcher, fc1
        self.exchange, self.sort = dispatcher.token_dispatch, dispatcher.dispatch_postprocess
        self.sent: tuple[Tensor, QuantizedTensor, Tensor] | None = None
        dispatcher.token_dispatch = self.token_dispatch
        dispatcher.dispatch_postprocess = self.dispatch_postprocess

    @property
    def state(self) -> LayerState:
        """The state of the first expert's fc1, which takes codes for all experts."""
        states = getattr(self.fc1, "expert_states", None)
        return states[0] if states else self.fc1[0].layer_state

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens (S, K) and probabilities (S,); return this rank's: codes (T, B), and (T,)."""
        state = self.state
        if not state.is_active(self.fc1.training) or state.plan.precision.fprop.lhs is None:
            return self.exchange(tokens, probs)
        context, source = state.context(state.shards()), tokens.detach()
        codes, _ = context.quantize(source, Role.INPUT, Gemm.FPROP, None, needs_codes=True)
        received, probs = self.exchange(as_bytes(codes.codes), probs)
        self.sent = tokens, codes, _Route.of(self.dispatcher).send(as_bytes(codes.scales))
        return received, probs

    def dispatch_postprocess(self, received: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Sort by expert what came; return fc1's input (T, K), with codes, and its counts."""
        if self.sent is None:
            return self.sort(received, probs)
        (tokens, like, scales), self.sent = self.sent, None
        # Scales, for they are small: Transformer Engine makes and sorts a gradient of zeros of what
        # it sorts with probabilities.
        scales, counts, probs = self.sort(scales, probs)
        route = _Route.of(self.dispatcher)
        codes = replace(
            like,
            codes=route.sort(received).view(like.codes.dtype),
            scales=scales.detach().view(like.scales.dtype),
            shape=(len(received), tokens.shape[1]),
        )
        x: Tensor = _Received.apply(tokens, len(received), route)  # type: ignore[no-untyped-call]
        self.state.set_input_codes(x, codes)
        return x, counts, probs


class _Route(NamedTuple):
    """Way of a micro batch's tokens through a dispatcher, which keeps only the last one's.

    ``sizes`` are numbers of tokens from each rank and to each rank; ``counts`` those from each rank
    for each local expert, None for one expert.
    """

    dispatcher: MoEAlltoAllTokenDispatcher
    sizes: tuple[Any, Any]
    counts: Tensor | None

    @classmethod
    def of(cls, dispatcher: MoEAlltoAllTokenDispatcher) -> "_Route":
        """Return the way of the present micro batch, whose sizes are on the host."""
        several = dispatcher.num_local_experts > 1
        counts = dispatcher.num_global_tokens_per_local_expert if several else None
        return cls(dispatcher, (dispatcher.output_splits, dispatcher.input_splits), counts)

    def send(self, rows: Tensor, back: bool = False) -> Tensor:
        """Send rows to their experts' ranks, or back to their tokens' ranks."""
        sizes, stream = self.sizes[::-1] if back else self.sizes, self.dispatcher.use_nccl_stream
        return all_to_all(self.dispatcher.ep_group, rows, *sizes, use_nccl_stream=stream)

    def sort(self, rows: Tensor, back: bool = False) -> Tensor:
        """Sort received rows by local expert, or back by rank."""
        if self.counts is None:
            return rows
        dispatcher, counts = self.dispatcher, self.counts
        order = dispatcher.sort_input_by_local_experts
        if back:
            order, counts = dispatcher.restore_output_by_local_experts, counts.T
        fused = dispatcher.config.moe_permute_fusion
        return sort_chunks_by_idxs(rows, counts.ravel(), order, fused=fused)[0]


class _Received(torch.autograd.Function):
    """Tensor for autograd in place of received tokens (T, K), in memory of one number.

    It is NaN, so that a product of it in place of the codes is not finite.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: int, route: _Route) -> Tensor:
        ctx.route = route
        return tokens.new_full((1, 1), torch.nan).expand(rows, tokens.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.route.send(ctx.route.sort(grad, back=True), back=True), None, None
