"""Hybrids of Mamba-2, attention and MLP blocks: megatron-core's MambaModel in local layers."""

from argparse import Namespace
from typing import Any

import torch

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_lowbit.megatron.attention import TorchAttention
from megatron_lowbit.megatron.cross_entropy import ChunkedLoss
from megatron_lowbit.megatron.linear import (
    LowbitColumnParallelLinear,
    LowbitRowParallelLinear,
)
from megatron_lowbit.megatron.mamba import use_best_scan
from megatron_lowbit.megatron.mxnorm import use_mxnorm
from megatron_lowbit.megatron.specs import TorchNorm


class LowbitMambaModel(ChunkedLoss, MambaModel):
    """megatron-core's model, with a loss that makes no FP32 copy of the logits."""


class LocalMambaStack(MambaStack):
    """megatron-core's stack, whose final norm is torch's: its own asks for Transformer Engine."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs, post_layer_norm=False)
        if self.post_process:
            self.post_layer_norm = True
            self.final_norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)


def hybrid_chunk(args: Namespace, shared: dict[str, Any], vp_stage: int | None) -> torch.nn.Module:
    """One pipeline stage of a hybrid; megatron-core has no virtual stages of one."""
    use_best_scan()
    spec = hybrid_stack_spec()
    if args.transformer_impl == "transformer_engine":
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
    if args.normalization == "MXNorm":
        spec = use_mxnorm(spec)
    pattern = args.hybrid_override_pattern
    return LowbitMambaModel(**shared, mamba_stack_spec=spec, hybrid_override_pattern=pattern)


def hybrid_stack_spec() -> ModuleSpec:
    """The stack, each block with a norm of its own before its first linear layer.

    Checkpoints name the norms as Transformer Engine's fused layers do.
    """
    column, row = LowbitColumnParallelLinear, LowbitRowParallelLinear
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row))
    mamba = MambaLayerSubmodules(
        norm=TorchNorm,
        mixer=mixer,
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=TorchNorm,
        self_attention=ModuleSpec(
            SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=column, core_attention=TorchAttention, linear_proj=row
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=TorchNorm,
        mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    return ModuleSpec(
        LocalMambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
        ),
    )
