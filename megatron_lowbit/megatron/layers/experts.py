"""Experts that ``--moe-grouped-gemm`` multiplies together, in local and Transformer Engine layers.

Megatron-LM groups experts in Transformer Engine layers only. Its grouped MLP, which takes any pair
of linear layers, is built here from parallel linear layers, one for each of a rank's experts.
Checkpoints are the same as without grouping. Transformer Engine's grouped layers keep the
parameters, their sharding and their checkpoints; the product is this project's. Each expert has a
plan and a state of its own, as if experts were not grouped.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lowbit.layers import GroupContext, LinearContext, lowbit_grouped_linear
from megatron_lowbit.layers.autograd_state import eager
from megatron_lowbit.layers.counts import TokensPerExpert, counts_on_host, permuted
from megatron_lowbit.megatron.layers.specs import change_parts
from megatron_lowbit.megatron.layers.state import (
    LayerPlan,
    LayerState,
    device_of,
    expert_contexts,
    split_features,
)


class GroupedLinear(torch.nn.ModuleList):
    """Parallel linear layers of a rank's experts."""

    def __init__(
        self, linears: Sequence[torch.nn.Module], pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(linears)
        self._groups = pg_collection
        self.register_load_state_dict_pre_hook(_rename_loaded)

    def forward(self, x: Tensor, tokens_per_expert: TokensPerExpert) -> tuple[Tensor, None]:
        """Multiply each expert's tokens, which come one expert after another, by its weight."""
        contexts = self._contexts(x.dtype is self[0].weight.dtype is torch.bfloat16)
        if contexts is not None:
            weights = [linear.weight for linear in self]
            operand = self[0].layer_state.operand_of(x)
            return lowbit_grouped_linear(operand, weights, contexts, tokens_per_expert), None
        parts = permuted(x, tokens_per_expert).split(counts_on_host(tokens_per_expert))
        products = [linear(part)[0] for linear, part in zip(self, parts, strict=True)]
        return torch.cat(products), None

    @eager  # Keys are others in every microbatch.
    def _contexts(self, in_bf16: bool) -> GroupContext | list[LinearContext | None] | None:
        """Return the experts' contexts; None where they are called one by one.

        They are in high precision, and where an expert's own call is watched.
        """
        if any(linear._forward_hooks or not hasattr(linear, "layer_state") for linear in self):
            return None
        return expert_contexts([linear.layer_state for linear in self], self.training, in_bf16)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the experts' tensors as shards along an axis of experts, as the grouped MLP asks.

        Names have the expert's number at their end: ``weight0``.
        """
        groups, sharded = self._groups, {}
        experts = groups.ep.size() * len(self)
        for number, linear in enumerate(self):
            offset = len(sharded_offsets), groups.ep.rank() * len(self) + number, experts
            shards = linear.sharded_state_dict(f"{number}.", (*sharded_offsets, offset), metadata)
            replace_prefix_for_sharding(shards, f"{number}.", prefix)
            for name, shard in shards.items():
                # An expert has a replica on each rank of its data-parallel group.
                shard.replica_id = (*shard.replica_id[:2], groups.expt_dp.rank())
                sharded[f"{prefix}{name.removeprefix(f'{number}.')}{number}"] = shard
        return sharded


def _rename_loaded(module: GroupedLinear, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give tensors of a checkpoint the names that they have in the module."""
    for number, linear in enumerate(module):
        for name in linear.state_dict():
            if f"{prefix}{name}{number}" in state_dict:
                loaded = state_dict.pop(f"{prefix}{name}{number}")
                state_dict[f"{prefix}{number}.{name}"] = loaded


def with_grouped_experts(spec: Any) -> Any:
    """Return a spec of local layers in which a layer's experts are multiplied together."""
    if isinstance(spec, partial) and spec.func is SequentialMLP:
        submodules = GroupedMLPSubmodules(
            linear_fc1=partial(_grouped, ColumnParallelLinear),
            linear_fc2=partial(_grouped, RowParallelLinear),
        )
        return partial(TEGroupedMLP, submodules=submodules)
    return change_parts(spec, with_grouped_experts)


def _grouped(
    linear_class: type,
    count: int,
    inputs: int,
    outputs: int,
    /,
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    skip_bias_add: bool,
    **options: Any,
) -> GroupedLinear:
    """Build a rank's layers; experts have no biases (``compatibility.py``)."""
    options |= {"config": config, "skip_bias_add": True, "tp_group": pg_collection.expt_tp}
    if linear_class is RowParallelLinear:
        options["input_is_parallel"] = True
    else:
        # A gated layer's rows are split in two parts over the ranks: gate and up projection.
        options |= {"gather_output": False, "stride": 2 if config.gated_linear_unit else 1}
    linears = [linear_class(inputs, outputs, **options) for _ in range(count)]
    return GroupedLinear(linears, pg_collection)


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
        # Otherwise it computes weight gradients later, or gathers weights first.
        is_plain = not module.delay_wgrad_compute
        self.is_plain = is_plain and module.config.expert_gtp_weight_remat_size == 1

    @eager  # The key is another one in every microbatch.
    def __call__(self, x: Tensor, tokens_per_expert: TokensPerExpert) -> tuple[Tensor, Any]:
        module, states = self.module, self.module.expert_states
        adds_bias = module.use_bias and not module.te_return_bias
        in_bf16 = self.is_plain and x.dtype is module.weight0.dtype is torch.bfloat16
        contexts = expert_contexts(states, module.training, in_bf16, adds_bias)
        if contexts is None:
            counts = counts_on_host(tokens_per_expert)
            return self.high_precision(permuted(x, tokens_per_expert), counts)
        experts = range(len(states))
        biases = [getattr(module, f"bias{i}") if module.use_bias else None for i in experts]
        added = biases if adds_bias else None
        weights = [getattr(module, f"weight{i}") for i in experts]
        operand = states[0].operand_of(x)
        y = lowbit_grouped_linear(operand, weights, contexts, tokens_per_expert, added)
        return y, biases if module.te_return_bias else None
