"""Attention's and the MLP's norm and first linear layer as one, by MXNorm, in local layers.

Under the names of Transformer Engine's fused layers, as checkpoints have them: a model goes from
RMSNorm to MXNorm and back by an argument. A layer that the recipe keeps in high precision has
RMSNorm itself.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_lowbit.megatron.linear import LowbitColumnParallelLinear
from megatron_lowbit.layers.mxnorm import mxnorm_linear
from megatron_lowbit.recipes import LinearPrecision


class MXNormColumnParallelLinear(LowbitColumnParallelLinear):
    """Y = MXNorm(X) (W gain)^T with W's rows split over the tensor-parallel group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(self.input_size, dtype=self.config.params_dtype, device=self.weight.device)
        )
        # Each rank has a part of its gradient then: megatron-core sums those that are so marked.
        self.layer_norm_weight.sequence_parallel = self.config.sequence_parallel

    def _in_high_precision(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any):
        gain, eps = self.layer_norm_weight, self.config.layernorm_epsilon
        normalized = F.rms_norm(input, gain.shape, gain, eps)
        return super()._in_high_precision(normalized, weight, **kwargs)

    def _product(
        self, input: torch.Tensor, weight: torch.Tensor, precision: LinearPrecision, **settings: Any
    ) -> torch.Tensor:
        norm = self.layer_state.plan.norm
        return mxnorm_linear(input, self.layer_norm_weight, weight, precision, norm, **settings)


def use_mxnorm(spec: Any) -> Any:
    """The same spec of local layers, norm and first linear layer of attention and MLPs in one."""
    if isinstance(spec, TransformerLayerSubmodules):
        attention = _with_fused(spec.self_attention, "linear_qkv")
        mlp = _with_fused(spec.mlp, "linear_fc1") if _is_dense(spec.mlp) else spec.mlp
        return dataclasses.replace(
            spec,
            self_attention=attention,
            input_layernorm=spec.input_layernorm
            if attention is spec.self_attention
            else IdentityOp,
            mlp=mlp,
            pre_mlp_layernorm=spec.pre_mlp_layernorm if mlp is spec.mlp else IdentityOp,
        )
    if isinstance(spec, ModuleSpec) or dataclasses.is_dataclass(spec):
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **{k: use_mxnorm(v) for k, v in fields.items()})
    if isinstance(spec, list):
        return [use_mxnorm(entry) for entry in spec]
    return spec


def _is_dense(spec: Any) -> bool:
    """Whether it is an MLP: a mixture of experts shares its norm with the router."""
    return isinstance(spec, ModuleSpec) and spec.module is MLP


def _with_fused(spec: Any, name: str) -> Any:
    if not isinstance(spec, ModuleSpec) or not hasattr(spec.submodules, name):
        return spec
    submodules = dataclasses.replace(spec.submodules, **{name: MXNormColumnParallelLinear})
    return dataclasses.replace(spec, submodules=submodules)


def mxnorm_layers(chunks: list[torch.nn.Module]) -> tuple[int, int]:
    """How many of this rank's layers have MXNorm, and how many have RMSNorm in its place."""
    modules = [
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, MXNormColumnParallelLinear)
    ]
    active = sum(module.layer_state.plan.precision.quantized for module in modules)
    return active, len(modules) - active
