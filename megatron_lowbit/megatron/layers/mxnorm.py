"""Norm and first linear layer of attention and MLPs as one, by MXNorm, in local layers.

Checkpoints have the names of Transformer Engine's fused layers: a model goes from RMSNorm to MXNorm
and back by an argument. A layer that the recipe keeps in high precision has
RMSNorm itself.
"""

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_lowbit.layers import LinearContext
from megatron_lowbit.layers.mxnorm import mxnorm_linear
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.megatron.layers.specs import change_parts
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.recipes import Layer


class MXNormColumnParallelLinear(ColumnParallelLinear):
    """Y = MXNorm(X) (W gain)^T with W's rows split over the tensor-parallel group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(self.input_size, dtype=self.config.params_dtype, device=self.weight.device)
        )
        # Each rank has a part of its gradient then: Megatron-LM sums those that are so marked.
        self.layer_norm_weight.sequence_parallel = self.config.sequence_parallel

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Any:
        """Normalize and multiply in high precision."""
        gain, eps = self.layer_norm_weight, self.config.layernorm_epsilon
        normalized = F.rms_norm(input, gain.shape, gain, eps)
        return super()._forward_impl(normalized, weight, **kwargs)

    def normalized_product(
        self, input: Tensor, weight: Tensor, context: LinearContext, bias: Tensor | None = None
    ) -> Tensor:
        """Normalize and multiply in a quantized precision; arguments as ``lowbit_linear``'s."""
        norm = self.layer_state.plan.norm
        return mxnorm_linear(input, self.layer_norm_weight, weight, context, norm, bias)


def mxnorm_of(args: Namespace) -> MXNorm | None:
    """Return the normalization that the arguments ask for; None for Megatron-LM's."""
    if not args.mxnorm:
        return None
    return MXNorm(p=args.mxnorm_p, eps=args.layernorm_epsilon, rounded=args.mxnorm_post_round)


class MXNormLayers(Feature):
    """Layers of a model with MXNorm in place of RMSNorm."""

    argument = "mxnorm"

    def check(self, layers: Sequence[Layer]) -> None:
        """Raise UserError if the recipe quantizes a layer without blocks for MXNorm."""
        self.run.recipe.check_mxnorm(layers, self.run.args.hidden_size)

    def describe(self) -> Iterator[str]:
        """Yield the number of this rank's layers with MXNorm, and with RMSNorm in its place."""
        args = self.run.args
        modules = [
            module
            for chunk in self.run.chunks
            for module in chunk.modules()
            if isinstance(module, MXNormColumnParallelLinear)
        ]
        active = sum(module.layer_state.plan.precision.quantized for module in modules)
        rounded = " of rounded absmaxes" if args.mxnorm_post_round else ""
        yield (
            f"MXNorm, p {args.mxnorm_p:g}{rounded}: {active} linear_qkv and linear_fc1 on rank 0; "
            f"RMSNorm in {len(modules) - active} that are not quantized"
        )


def with_mxnorm(spec: Any) -> Any:
    """Return a spec of local layers in which first linear layers normalize their input."""
    if not isinstance(spec, TransformerLayerSubmodules):
        return change_parts(spec, with_mxnorm)
    for part, linear, norm in (
        ("self_attention", "linear_qkv", "input_layernorm"),
        ("mlp", "linear_fc1", "pre_mlp_layernorm"),
    ):
        fused = _with_fused(getattr(spec, part), linear)
        if fused is not None:
            spec = dataclasses.replace(spec, **{part: fused, norm: IdentityOp})
    return spec


def _with_fused(spec: Any, name: str) -> Any:
    """Return a spec whose first linear layer normalizes; None where there is no such layer.

    A mixture of experts stays as it is: it shares its norm with the router.
    """
    fused = {name: MXNormColumnParallelLinear}
    if isinstance(spec, partial) and spec.func == MLP.as_mlp_submodule:
        return partial(spec, submodules=dataclasses.replace(spec.keywords["submodules"], **fused))
    if isinstance(spec, ModuleSpec) and hasattr(spec.submodules, name):
        return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **fused))
    return None
