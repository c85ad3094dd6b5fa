"""Megatron-LM's column- and row-parallel linear layers under a recipe, and experts of them.

Only the product changes: Megatron-LM's classes keep the parameters, their sharding in checkpoints,
the communication around the layer, and ``forward``. ``_forward_impl``, their hook around the
product, becomes :func:`megatron_lowbit.layers.lowbit_linear` where the recipe quantizes the layer.

Megatron-LM groups experts (``--moe-grouped-gemm``) in Transformer Engine layers only. Its grouped
MLP, which takes any pair of linear layers, is built here from parallel linear layers, one for each
of a rank's experts. Checkpoints are those of experts that are not grouped.
"""

import weakref
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

from megatron_lowbit.layers import (
    GroupContext,
    LinearContext,
    lowbit_grouped_linear,
    lowbit_linear,
)
from megatron_lowbit.layers.autograd_state import eager
from megatron_lowbit.megatron.layers.specs import change_parts
from megatron_lowbit.megatron.layers.state import (
    LayerPlan,
    LayerState,
    device_of,
    expert_contexts,
    split_features,
)


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
        return expert_contexts([linear.layer_state for linear in self], self.training)

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
