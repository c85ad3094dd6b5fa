"""Autograd: linear layers whose three GEMMs run as a recipe says."""

from megatron_lowbit.layers.context import LinearContext, WeightCache
from megatron_lowbit.layers.counts import DeviceCounts
from megatron_lowbit.layers.grouped import GroupContext, counts_on_device, lowbit_grouped_linear
from megatron_lowbit.layers.linear import lowbit_linear
from megatron_lowbit.layers.mlp import lowbit_mlp
from megatron_lowbit.layers.sharding import UNSHARDED, Shards

__all__ = [
    "UNSHARDED",
    "DeviceCounts",
    "GroupContext",
    "LinearContext",
    "Shards",
    "WeightCache",
    "counts_on_device",
    "lowbit_grouped_linear",
    "lowbit_linear",
    "lowbit_mlp",
]
