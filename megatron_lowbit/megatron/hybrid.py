"""Hybrid models of Mamba-2, attention, MLP and expert blocks with local layers.

Megatron-LM only has a hybrid stack of Transformer Engine's layers.
"""

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.training.models import HybridModelConfig


class LocalHybridStack(HybridStack):
    """Megatron's hybrid stack with torch's final norm instead of Transformer Engine's."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        post_layer_norm = kwargs.pop("post_layer_norm", True)
        super().__init__(config, *args, **kwargs, post_layer_norm=False)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = WrappedTorchNorm(
                config, config.hidden_size, eps=config.layernorm_epsilon
            )


def use_local_stack(model_config: HybridModelConfig) -> None:
    """Set the stack's spec of a hybrid with local layers, which Megatron-LM does not have."""
    is_local = model_config.transformer.transformer_impl == "local"
    if is_local and model_config.hybrid_stack_spec is None:
        model_config.hybrid_stack_spec = local_stack_spec(model_config.transformer)


def local_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a hybrid stack with a separate norm before each block's linear layers.

    Checkpoints use the same names for the norms as Transformer Engine's fused layers.
    """
    gpt = get_gpt_layer_local_submodules()
    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(MambaMixer, submodules=projections),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    latent = get_gpt_layer_local_submodules(multi_latent_attention=True)
    attention, latent_attention = (
        TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=layer.self_attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=layer.sharded_state_dict_keys_map,
        )
        for layer in (gpt, latent)
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=gpt.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=gpt.sharded_state_dict_keys_map,
    )
    experts = get_moe_module_spec(
        use_te=False,
        num_experts=config.num_moe_experts or 1,  # not built for patterns without experts
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    moe = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm, mlp=experts, mlp_bda=get_bias_dropout_add
    )
    return ModuleSpec(
        LocalHybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
            mla_layer=ModuleSpec(TransformerLayer, submodules=latent_attention),
            moe_layer=ModuleSpec(MoETransformerLayer, submodules=moe),
            mtp_block_spec=_predictions_spec(),
        ),
    )


def _predictions_spec() -> ModuleSpec:
    """Return the spec of multi-token prediction, whose inner layers follow the pattern."""
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        layer_norm=WrappedTorchNorm,
    )
    return ModuleSpec(
        MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[ModuleSpec(MultiTokenPredictionLayer, submodules=layer)]
        ),
    )
