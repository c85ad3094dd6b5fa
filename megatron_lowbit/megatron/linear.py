"""Megatron's column- and row-parallel linears, computing as their recipe says.

Only the product changes: Megatron's own classes keep the parameters, their sharding in checkpoints,
the communication around the layer, and ``forward``. Their hook ``_forward_impl`` becomes
:func:`megatron_lowbit.layers.lowbit_linear` where the recipe quantizes the layer.
"""

from typing import Any

import torch

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.quantization.quant_config import QuantizationConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_lowbit.megatron.layer_state import LayerState, split_features
from megatron_lowbit.layers import UNSHARDED, Shards, lowbit_linear
from megatron_lowbit.recipes import HIGH_PRECISION


class _LowbitParallelLinear:
    """What both classes share; ``layer_state`` is None outside the model's blocks."""

    layer_state: LayerState | None = None

    def finish_init(self, quantization_config: QuantizationConfig | None) -> None:
        """Take the layer's precision; the model calls this on every submodule that has it."""
        if self.is_expert:
            # megatron-core does so only where experts are spread over ranks. Doing it everywhere
            # gives experts an optimizer of their own, and checkpoints one structure in all layouts.
            for parameter in self.parameters():
                parameter.allreduce = False
        if quantization_config is None:
            return
        plan, device = quantization_config.config["plan"], self.weight.device
        features = split_features(plan.layer.path, *self._split(), self.tp_group, device)
        self.layer_state = LayerState(plan, device, features, self.is_expert)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any):
        """Megatron's hook around the product: the only thing that the recipe changes."""
        state = self.layer_state
        # An expert without tokens has nothing to quantize, nor an amax to record.
        if state is None or state.plan.precision == HIGH_PRECISION or input.numel() == 0:
            return self._in_high_precision(input, weight, *args, **kwargs)
        shards = UNSHARDED
        if state.features is not None:
            shards = self._shards(kwargs["sequence_parallel"], kwargs["allreduce_dgrad"])
        return self._product(
            input,
            weight,
            state.plan.precision,
            bias=kwargs["bias"],
            key=state.microbatch_key(),
            shards=shards,
            engine=state.plan.engine,
            accumulate_main_grad=state.plan.accumulate_main_grad,
            amax_history=state.amax_history,
            weight_cache=state.weight_cache,
        )

    def _in_high_precision(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._forward_impl(*args, **kwargs)

    def _product(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return lowbit_linear(*args, **kwargs)


class LowbitColumnParallelLinear(_LowbitParallelLinear, ColumnParallelLinear):
    """Y = X W^T with W's rows, and so Y's features, split over the tensor-parallel group."""

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, stride=stride, **kwargs)
        self.stride = stride

    def _split(self) -> tuple[int, int]:
        return self.output_size_per_partition, self.stride

    def _shards(self, sequence_parallel: bool, allreduce_dgrad: bool) -> Shards:
        roles = {"weight", "grad"} | ({"input"} if sequence_parallel else set())
        return Shards(
            group=self.tp_group,
            roles=frozenset(roles),
            out_features=self.layer_state.features,
            sequence_parallel=sequence_parallel,
            allreduce_dgrad=allreduce_dgrad,
        )


class LowbitRowParallelLinear(_LowbitParallelLinear, RowParallelLinear):
    """Y = X W^T with W's columns, and so X's features, split over the tensor-parallel group."""

    def _split(self) -> tuple[int, int]:
        return self.input_size_per_partition, 1

    def _shards(self, sequence_parallel: bool, allreduce_dgrad: bool) -> Shards:
        return Shards(
            group=self.tp_group,
            roles=frozenset({"weight", "input"}),
            in_features=self.layer_state.features,
        )
