"""Model specs: megatron-core's own, with linears, norms and attention swapped for others here."""

import dataclasses
from typing import Any

import torch

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.megatron.attention import TorchAttention
from megatron_lowbit.megatron.linear import (
    LowbitColumnParallelLinear,
    LowbitRowParallelLinear,
)


class TorchNorm:
    """torch's LayerNorm or RMSNorm, also under sequence parallelism.

    There the parameters see this rank's tokens only: their mark makes megatron-core sum their
    gradients over the tensor-parallel group.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = norms[config.normalization](
            hidden_size,
            eps=eps,
            device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu",
            dtype=config.params_dtype,
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


_SWAPS = {
    ColumnParallelLinear: LowbitColumnParallelLinear,
    RowParallelLinear: LowbitRowParallelLinear,
    WrappedTorchNorm: TorchNorm,
    DotProductAttention: TorchAttention,
}


def swap_modules(spec: Any) -> Any:
    """The same spec, with every class that this project replaces replaced, at any depth."""
    if isinstance(spec, type):
        return _SWAPS.get(spec, spec)
    if isinstance(spec, ModuleSpec) or dataclasses.is_dataclass(spec):
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **{k: swap_modules(v) for k, v in fields.items()})
    if isinstance(spec, list):
        return [swap_modules(entry) for entry in spec]
    return spec
