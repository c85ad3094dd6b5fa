"""Megatron's column- and row-parallel linears, computing as their recipe says.

Only the product changes: Megatron's own classes keep the parameters, their sharding in checkpoints,
the communication around the layer, and ``forward``. Their hook ``_forward_impl`` becomes
:func:`megatron_lowbit.layers.lowbit_linear` where the recipe quantizes the layer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.quantization.quant_config import QuantizationConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_lowbit.integrations.megatron_core import experts
from megatron_lowbit.integrations.megatron_core.quant_recipe import LayerPlan
from megatron_lowbit.layers import UNSHARDED, Shards, WeightCache, lowbit_linear
from megatron_lowbit.numerics import AmaxHistory, derive_key
from megatron_lowbit.numerics.philox import WORDS
from megatron_lowbit.recipes import HIGH_PRECISION, OPERANDS, LinearPrecision, Recipe


class _LowbitParallelLinear:
    """What both classes share; ``plan`` is None outside the model's blocks."""

    plan: LayerPlan | None = None
    amax_history: AmaxHistory | None = None

    def finish_init(self, quantization_config: QuantizationConfig | None) -> None:
        """Take the layer's precision; the model calls this on every submodule that has it."""
        if self.is_expert:
            # megatron-core does so only where experts are spread over ranks. Doing it everywhere
            # gives experts an optimizer of their own, and checkpoints one structure in all layouts.
            for parameter in self.parameters():
                parameter.allreduce = False
        if quantization_config is None:
            return
        plan: LayerPlan = quantization_config.config["plan"]
        self.plan = plan
        self.key = derive_key(plan.layer.path)
        self.weight_cache = WeightCache()
        self.feature_numbers = self._feature_numbers()
        self.set_precision(plan.precision)

    def set_precision(self, precision: LinearPrecision) -> None:
        """Compute in another precision from now on; recorded amaxes stay where they are used."""
        self.plan = replace(self.plan, precision=precision)
        self.weight_cache.operands = None
        length = precision.history_length
        if length == 0:
            self.amax_history = None
        elif self.amax_history is None or self.amax_history.length != length:
            self.amax_history = AmaxHistory(len(OPERANDS), length, self.weight.device)

    def _feature_numbers(self) -> torch.Tensor | None:
        """Global numbers (int64) of the features that tensor parallelism splits; None unsplit."""
        ranks = self.tp_group.size()
        if ranks == 1:
            return None
        split, parts = self._split_features()
        part = split // parts
        if part % WORDS:
            raise UserError(
                f"--tensor-model-parallel-size {ranks} gives {self.plan.layer.path} parts of "
                f"{part} features, no multiple of {WORDS}: choose a smaller one"
            )
        # A gated fc1 holds its share of the gate, then its share of the up projection.
        starts = (torch.arange(parts) * ranks + self.tp_group.rank()) * part
        numbers = (starts[:, None] + torch.arange(part)).flatten()
        return numbers.to(self.weight.device)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any):
        """Megatron's hook around the product: the only thing that the recipe changes."""
        # An expert without tokens has nothing to quantize, nor an amax to record.
        if self.plan is None or self.plan.precision == HIGH_PRECISION or input.numel() == 0:
            return super()._forward_impl(input, weight, *args, **kwargs)
        shards = UNSHARDED
        if self.feature_numbers is not None:
            shards = self._shards(kwargs["sequence_parallel"], kwargs["allreduce_dgrad"])
        return lowbit_linear(
            input,
            weight,
            self.plan.precision,
            bias=kwargs["bias"],
            key=derive_key(experts.microbatch_key(self.is_expert), self.key),
            shards=shards,
            engine=self.plan.engine,
            accumulate_main_grad=self.plan.accumulate_main_grad,
            amax_history=self.amax_history,
            weight_cache=self.weight_cache,
        )


class LowbitColumnParallelLinear(_LowbitParallelLinear, ColumnParallelLinear):
    """Y = X W^T with W's rows, and so Y's features, split over the tensor-parallel group."""

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, stride=stride, **kwargs)
        self.stride = stride

    def _split_features(self) -> tuple[int, int]:
        return self.output_size_per_partition, self.stride

    def _shards(self, sequence_parallel: bool, allreduce_dgrad: bool) -> Shards:
        roles = {"weight", "grad"} | ({"input"} if sequence_parallel else set())
        return Shards(
            group=self.tp_group,
            roles=frozenset(roles),
            out_features=self.feature_numbers,
            sequence_parallel=sequence_parallel,
            allreduce_dgrad=allreduce_dgrad,
        )


class LowbitRowParallelLinear(_LowbitParallelLinear, RowParallelLinear):
    """Y = X W^T with W's columns, and so X's features, split over the tensor-parallel group."""

    def _split_features(self) -> tuple[int, int]:
        return self.input_size_per_partition, 1

    def _shards(self, sequence_parallel: bool, allreduce_dgrad: bool) -> Shards:
        return Shards(
            group=self.tp_group,
            roles=frozenset({"weight", "input"}),
            in_features=self.feature_numbers,
        )


def lowbit_linears(
    chunks: Iterable[torch.nn.Module],
) -> Iterator[LowbitColumnParallelLinear | LowbitRowParallelLinear]:
    """The linear layers of this rank that a recipe reaches."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, _LowbitParallelLinear) and module.plan is not None:
                yield module


def set_recipe(chunks: Iterable[torch.nn.Module], recipe: Recipe) -> None:
    """Let every linear layer compute as the recipe says from now on."""
    for module in lowbit_linears(chunks):
        module.set_precision(recipe.precision_for(module.plan.layer))


def forget_quantized_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """To be called whenever weights have changed: they are then quantized anew."""
    for module in lowbit_linears(chunks):
        module.weight_cache.operands = None
