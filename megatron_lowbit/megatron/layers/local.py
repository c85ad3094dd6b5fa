"""Megatron-LM's column- and row-parallel linear layers under a recipe.

Only the product changes: Megatron-LM's classes keep the parameters, their sharding in checkpoints,
the communication around the layer, and ``forward``. ``_forward_impl``, their hook around the
product, becomes :func:`megatron_lowbit.layers.lowbit_linear` where the recipe quantizes the layer.
"""

import weakref
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_lowbit.layers import lowbit_linear
from megatron_lowbit.layers.autograd_state import eager
from megatron_lowbit.megatron.layers.state import LayerPlan, LayerState, device_of, split_features


def linears_of(chunk: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return a chunk's parallel linear layers by their path in it."""
    classes = (ColumnParallelLinear, RowParallelLinear)
    return {name: module for name, module in chunk.named_modules() if isinstance(module, classes)}


def take_over(module: torch.nn.Module, plan: LayerPlan) -> LayerState:
    """Let a parallel linear layer compute as its plan says; return the state it now has."""
    is_column = isinstance(module, ColumnParallelLinear)
    split = module.output_size_per_partition if is_column else module.input_size_per_partition
    features = split_features(split, module.weight, module.tp_group)
    state = LayerState(
        plan, device_of(module.weight), module.tp_group, features, is_column, module.is_expert
    )
    module.layer_state = state
    module._forward_impl = _Product(module, state)
    return state


class _Product:
    """The product of a parallel linear layer, in the precision of its state."""

    def __init__(self, module: torch.nn.Module, state: LayerState) -> None:
        self.state = state
        self.module = weakref.proxy(module)
        self.high_precision = module._forward_impl
        self.quantized = getattr(module, "normalized_product", lowbit_linear)

    @eager  # The key is another one in every microbatch.
    def __call__(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state = self.state
        # An expert without tokens has nothing to quantize, nor an amax to record.
        if not state.is_active(self.module.training) or input.numel() == 0:
            return self.high_precision(input, weight, *args, **kwargs)
        shards = state.shards(kwargs["sequence_parallel"], kwargs["allreduce_dgrad"])
        context = state.context(shards)
        return self.quantized(state.operand_of(input), weight, context, bias=kwargs["bias"])
