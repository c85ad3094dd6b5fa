"""Dispatch of tokens to experts that are all on one rank, without copies of counts and tokens.

Megatron-LM's all-to-all dispatcher copies the number of tokens of each expert to the CPU and waits
for it. Then it sorts the tokens by expert, although its permutation has put them in that order.
"""

import weakref
from functools import partial
from types import SimpleNamespace

from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_lowbit.layers import DeviceCounts
from megatron_lowbit.megatron.features import Feature


class ExpertCounts(Feature):
    """Dispatchers of this rank's chunks that leave counts of tokens on the device."""

    def install(self) -> None:
        """Replace methods of the dispatchers of layers that suit."""
        for chunk in self.run.chunks:
            for module in chunk.modules():
                if isinstance(module, MoELayer) and _suits(module):
                    _take_over(module.token_dispatcher)
                # In local graphs a hybrid's layer waits for the dispatcher's copies itself.
                elif hasattr(module, "_router_dtoh_event") and _suits(module.mlp):
                    module._router_dtoh_event = _NO_EVENT


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


def _take_over(dispatcher: MoEAlltoAllTokenDispatcher) -> None:
    dispatcher._maybe_dtoh_and_synchronize = lambda point, counts: counts
    dispatcher.dispatch_postprocess = partial(_dispatch_postprocess, weakref.proxy(dispatcher))
    dispatcher.combine_preprocess = lambda outputs: outputs


def _dispatch_postprocess(
    dispatcher: MoEAlltoAllTokenDispatcher, tokens: Tensor, probs: Tensor
) -> tuple[Tensor, DeviceCounts, Tensor]:
    """Return tokens (T, K) and probabilities (T,) as they are, with the experts' counts."""
    counts = DeviceCounts(dispatcher.tokens_per_expert, len(tokens))
    dispatcher.tokens_per_expert = None
    return tokens, counts, probs
