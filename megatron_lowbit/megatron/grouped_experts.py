"""Experts that ``--moe-grouped-gemm`` groups, in local layers.

Megatron-LM groups experts in Transformer Engine's layers alone. Its grouped MLP, which takes any
pair of linear layers, is built here from Megatron-LM's parallel linear layers, one for each of a
rank's experts. Checkpoints are those of experts that are not grouped.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import (
    GroupedMLPSubmodules,
    SequentialMLP,
    TEGroupedMLP,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lowbit.layers import GroupContext, LinearContext, lowbit_grouped_linear
from megatron_lowbit.layers.autograd_state import eager
from megatron_lowbit.megatron.layer_state import expert_contexts
from megatron_lowbit.megatron.specs import change_parts


class GroupedLinear(torch.nn.ModuleList):
    """Parallel linear layers of a rank's experts."""

    def __init__(
        self, linears: Sequence[torch.nn.Module], pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(linears)
        self._groups = pg_collection
        self.register_load_state_dict_pre_hook(_rename_loaded)

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """Multiply each expert's tokens, which come one expert after another, by its weight."""
        contexts = self._contexts()
        if contexts is not None:
            weights = [linear.weight for linear in self]
            biases = [None] * len(self)
            return lowbit_grouped_linear(x, weights, contexts, tokens_per_expert, biases), None
        parts = x.split(tokens_per_expert)
        products = [linear(part)[0] for linear, part in zip(self, parts, strict=True)]
        return torch.cat(products), None

    @eager  # Keys are others in every microbatch.
    def _contexts(self) -> GroupContext | list[LinearContext | None] | None:
        """Return the experts' contexts; None where they are called one by one.

        They are in high precision, and where an expert's own call is watched.
        """
        if any(linear._forward_hooks or not hasattr(linear, "layer_state") for linear in self):
            return None
        states = [linear.layer_state for linear in self]
        return expert_contexts(states, self.training)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the experts' tensors as shards along an axis of experts, as the grouped MLP asks.

        Names have the expert's number at their end: ``weight0``.
        """
        groups, sharded = self._groups, {}
        experts = groups.ep.size() * len(self)
        for number, linear in enumerate(self):
            place = len(sharded_offsets), groups.ep.rank() * len(self) + number, experts
            own = linear.sharded_state_dict(f"{number}.", (*sharded_offsets, place), metadata)
            replace_prefix_for_sharding(own, f"{number}.", prefix)
            for name, shard in own.items():
                # Replicas of an expert are those of its data-parallel group.
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
        submodules = GroupedMLPSubmodules(linear_fc1=_first_linears, linear_fc2=_second_linears)
        return partial(TEGroupedMLP, submodules=submodules)
    return change_parts(spec, with_grouped_experts)


def _first_linears(
    count: int, inputs: int, outputs: int, /, *, config: TransformerConfig, **options: Any
) -> GroupedLinear:
    # A gated layer's rows are split in two parts over the ranks: gate and up projection.
    more = {"gather_output": False, "stride": 2 if config.gated_linear_unit else 1}
    return _linears(ColumnParallelLinear, count, inputs, outputs, config, more, **options)


def _second_linears(
    count: int, inputs: int, outputs: int, /, *, config: TransformerConfig, **options: Any
) -> GroupedLinear:
    more = {"input_is_parallel": True}
    return _linears(RowParallelLinear, count, inputs, outputs, config, more, **options)


def _linears(
    kind: type,
    count: int,
    inputs: int,
    outputs: int,
    config: TransformerConfig,
    more: dict[str, Any],
    *,
    pg_collection: ProcessGroupCollection,
    skip_bias_add: bool,
    **options: Any,
) -> GroupedLinear:
    """Build a rank's layers; experts have no biases (``compatibility.py``)."""
    group = pg_collection.expt_tp
    linears = [
        kind(inputs, outputs, config=config, skip_bias_add=True, tp_group=group, **more, **options)
        for _ in range(count)
    ]
    return GroupedLinear(linears, pg_collection)
