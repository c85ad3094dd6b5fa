"""Dispatch of tokens to experts that are all on one rank, without copies of counts and tokens.

Megatron-LM's all-to-all dispatcher copies the number of tokens of each expert to the CPU and waits
for it. Then it sorts the tokens by expert, although its permutation has put them in that order.
Experts that quantize their input need no permuted copy either: they take tokens by their numbers.
"""

import weakref
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_lowbit.layers import DeviceCounts, counts_on_device
from megatron_lowbit.layers.counts import Permutation
from megatron_lowbit.layers.grouped import can_group, quantizes_input
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.megatron.layers.state import weights_of


class ExpertCounts(Feature):
    """Dispatchers of this rank's chunks that leave counts of tokens on the device."""

    def install(self) -> None:
        """Replace methods of the dispatchers of layers that suit."""
        modules = [module for chunk in self.run.chunks for module in chunk.modules()]
        self._layers = [m for m in modules if isinstance(m, MoELayer) and _suits(m)]
        for layer in self._layers:
            _take_over(layer.token_dispatcher)
        for module in modules:
            # In local graphs a hybrid's layer waits for the dispatcher's copies itself.
            if hasattr(module, "_router_dtoh_event") and _suits(module.mlp):
                module._router_dtoh_event = _NO_EVENT

    def wrap(self, wrapped: list[torch.nn.Module]) -> None:
        """Prepare for graphs that are captured before the first step, with weights in BF16."""
        self.begin_step(0, training=True)

    def begin_step(self, iteration: int, training: bool) -> None:
        """Leave tokens in their order where the step's precision takes them so."""
        for layer in self._layers:
            dispatcher = layer.token_dispatcher
            preprocess = type(dispatcher).dispatch_preprocess
            if _takes_tokens(layer, training):
                preprocess = _leave_tokens
            dispatcher.dispatch_preprocess = partial(preprocess, weakref.proxy(dispatcher))
            dispatcher.token_of_row = None


_NO_EVENT = SimpleNamespace(record=lambda: None, synchronize=lambda: None)


def _suits(layer: MoELayer) -> bool:
    """Return True if a layer's experts are grouped, here, and take all of their tokens."""
    dispatcher, config = layer.token_dispatcher, layer.config
    return (
        type(dispatcher) is MoEAlltoAllTokenDispatcher
        and dispatcher.ep_size == dispatcher.tp_size == 1
        and type(layer.experts) is TEGroupedMLP
        # With a capacity the number of rows follows from the counts.
        and config.moe_expert_capacity_factor is None
        # The grouped MLP pads tokens, adds biases and runs fused operations by numbers on the CPU.
        and not (config.fp8 or config.fp4)
        and not config.add_bias_linear
        and not config.use_transformer_engine_op_fuser
        # It frees the experts' input, which the sort copies from memory of a CUDA graph.
        and not config.fine_grained_activation_offloading
    )


def _takes_tokens(layer: MoELayer, training: bool) -> bool:
    """Return True if kernels quantize the tokens of a layer's experts by numbers of rows.

    A token of one expert is permuted once, and overlapped shared experts take what is dispatched.
    """
    pairs = [*weights_of(layer.experts.linear_fc1)]
    if not pairs or layer.config.moe_router_topk == 1 or layer.token_dispatcher.shared_experts:
        return False
    weights, states = zip(*pairs, strict=True)
    context = states[0].weight_context()
    return (
        states[0].is_active(training)
        and all(state.plan.precision == context.precision for state in states)
        and can_group(context)
        and quantizes_input(context)
        and counts_on_device(context, weights, 1)
    )


def _take_over(dispatcher: MoEAlltoAllTokenDispatcher) -> None:
    dispatcher._maybe_dtoh_and_synchronize = lambda point, counts: counts
    dispatcher.dispatch_postprocess = partial(_dispatch_postprocess, weakref.proxy(dispatcher))
    dispatcher.combine_preprocess = lambda outputs: outputs
    dispatcher.cudagraph_attrs.append("token_of_row")


def _leave_tokens(
    dispatcher: MoEAlltoAllTokenDispatcher, hidden: Tensor, routing_map: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the tokens (T0, K) as they are, and permuted probabilities (T,).

    The dispatcher permutes numbers of tokens, (T0, 1), exact in FP32 up to 2**24.
    """
    tokens = hidden.view(-1, hidden.shape[-1])
    numbers = torch.arange(len(tokens), dtype=torch.float32, device=hidden.device)
    # Transformer Engine gives probabilities no gradient where tokens have none.
    numbers = numbers.view(*hidden.shape[:-1], 1).requires_grad_()
    permute = MoEAlltoAllTokenDispatcher.dispatch_preprocess
    rows, permuted_probs = permute(dispatcher, numbers, routing_map, probs)
    dispatcher.token_of_row = rows.detach().flatten().int()
    dispatcher.hidden_shape, dispatcher.hidden_shape_before_permute = hidden.shape, tokens.shape
    return tokens, permuted_probs


def _dispatch_postprocess(
    dispatcher: MoEAlltoAllTokenDispatcher, tokens: Tensor, probs: Tensor
) -> tuple[Tensor, DeviceCounts, Tensor]:
    """Return tokens (T or T0, K) and probabilities (T,) as they are, with the experts' counts."""
    permutation = None
    if len(tokens) != len(probs):
        sum_by_token = partial(
            unpermute,
            sorted_indices=dispatcher.reversed_local_input_permutation_mapping,
            restore_shape=tokens.shape,
            fused=dispatcher.config.moe_permute_fusion,
        )
        permutation = Permutation(dispatcher.token_of_row, sum_by_token)
    counts = DeviceCounts(dispatcher.tokens_per_expert, len(probs), permutation)
    dispatcher.tokens_per_expert = None
    return tokens, counts, probs
