"""Transformer Engine's grouped linear layers under a recipe.

They keep the parameters, their sharding and their checkpoints; the product is this project's.
Each expert has a plan and a state of its own, as if experts were not grouped.
"""

import weakref
from typing import Any, NamedTuple

import torch

from megatron_lowbit.layers import lowbit_grouped_linear
from megatron_lowbit.layers.autograd_state import eager
from megatron_lowbit.megatron.layer_plan import LayerPlan
from megatron_lowbit.megatron.layer_state import (
    LayerState,
    device_of,
    expert_contexts,
    split_features,
)


class Expert(NamedTuple):
    """A local expert's part of a grouped linear layer."""

    grouped: torch.nn.Module
    number: int


def take_over_expert(expert: Expert, plan: LayerPlan, is_column: bool) -> LayerState:
    """Let an expert compute as its plan says; return the state it now has."""
    module, number = expert
    if number == 0:
        module.expert_states = []
        module.forward = _GroupedProduct(module)
    weight = getattr(module, f"weight{number}")
    parts = 2 if is_column and module.config.gated_linear_unit else 1
    features = split_features(weight.shape[0 if is_column else 1], weight, module._tp_group, parts)
    state = LayerState(
        plan, device_of(weight), module._tp_group, features, is_column, is_expert=True
    )
    module.expert_states.append(state)
    return state


class _GroupedProduct:
    """The forward pass of a grouped linear layer, in the precisions of its experts' states."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.proxy(module)
        self.high_precision = module.forward

    @eager  # The key is another one in every microbatch.
    def __call__(self, x: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, Any]:
        module, states = self.module, self.module.expert_states
        adds_bias = module.use_bias and not module.te_return_bias
        contexts = expert_contexts(states, module.training, adds_bias)
        if contexts is None:
            return self.high_precision(x, tokens_per_expert)
        experts = range(len(states))
        biases = [getattr(module, f"bias{i}") if module.use_bias else None for i in experts]
        added = biases if adds_bias else [None] * len(states)
        weights = [getattr(module, f"weight{i}") for i in experts]
        y = lowbit_grouped_linear(x, weights, contexts, tokens_per_expert, added)
        return y, biases if module.te_return_bias else None
