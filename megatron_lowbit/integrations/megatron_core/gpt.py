"""Builds a GPTModel from parsed arguments, its linears under a recipe."""

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_lowbit.integrations.megatron_core import experts
from megatron_lowbit.integrations.megatron_core.cross_entropy import vocab_parallel_cross_entropy
from megatron_lowbit.integrations.megatron_core.linear import lowbit_linears
from megatron_lowbit.integrations.megatron_core.quant_recipe import QuantRecipe
from megatron_lowbit.integrations.megatron_core.rope import use_fused_rope
from megatron_lowbit.integrations.megatron_core.specs import gpt_block_spec
from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.recipes import Layer, Recipe


class LowbitGPTModel(GPTModel):
    """megatron-core's model, with a loss that makes no FP32 copy of the logits."""

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Losses (b, s) in FP32 of labels (b, s) and logits (s, b, this rank's vocabulary)."""
        losses = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1), self.tp_group)
        return losses.transpose(0, 1).contiguous()


def transformer_config(args: Namespace, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of the model that the arguments describe."""
    cuda = torch.cuda.is_available()
    if cuda:
        use_fused_rope()
    activation = F.silu if args.swiglu else squared_relu if args.squared_relu else F.gelu
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=not args.disable_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=activation,
        init_method_std=args.init_method_std,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        **_expert_config(args),
        # Batched p2p with interleaved stages gives wrong gradients without an error.
        batch_p2p_comm=args.virtual_pipeline_model_parallel_size is None,
        overlap_p2p_comm=args.virtual_pipeline_model_parallel_size is not None,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        # For high-precision layers alone, and only with Apex's extension: megatron-core raises
        # without. Quantized layers add to main_grad by themselves.
        gradient_accumulation_fusion=(
            args.gradient_accumulation_fusion and parallel_layers._grad_accum_fusion_available
        ),
        masked_softmax_fusion=False,
        bias_activation_fusion=cuda and _activation_fuses(args),
        bias_dropout_fusion=cuda,
        persist_layer_norm=False,
        apply_rope_fusion=cuda,
    )


def _expert_config(args: Namespace) -> dict[str, Any]:
    """What the configuration says about experts; nothing for a dense model."""
    if args.num_experts is None:
        return {}
    return {
        "num_moe_experts": args.num_experts,
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
        "moe_layer_freq": args.moe_layer_freq,
        "moe_router_topk": args.moe_router_topk,
        "moe_router_pre_softmax": args.moe_router_pre_softmax,
        "moe_router_load_balancing_type": args.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
        # BF16 scores would tie, and route a token by the order of experts.
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


def _activation_fuses(args: Namespace) -> bool:
    """Whether megatron-core's fused bias and activation has this one, also in experts."""
    if args.num_experts is not None:
        return args.swiglu and args.disable_bias_linear
    return not args.squared_relu


def build_gpt(
    args: Namespace,
    config: TransformerConfig,
    recipe: Recipe,
    engine: Engine,
    padded_vocab_size: int,
) -> list[torch.nn.Module]:
    """This rank's model chunks: one, or one for each virtual pipeline stage."""
    stages = config.virtual_pipeline_model_parallel_size
    experts.use_torch_router()
    chunks = []
    for vp_stage in range(stages or 1):
        stage = vp_stage if stages else None
        config.quant_recipe = QuantRecipe(
            recipe,
            config.num_layers,
            get_transformer_layer_offset(config, vp_stage=stage),
            engine,
            accumulate_main_grad=args.gradient_accumulation_fusion,
            first_expert=experts.first_local(config),
        )
        chunk = LowbitGPTModel(
            config=config,
            transformer_layer_spec=gpt_block_spec(config, stage),
            vocab_size=padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            vp_stage=stage,
        )
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        chunk = chunk.to(device)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    return chunks


def quantizable_layers(chunks: list[torch.nn.Module]) -> list[Layer]:
    """Every linear layer of the whole model that a recipe can reach, in order of its path."""
    mine = [module.plan.layer for module in lowbit_linears(chunks)]
    gathered: list[list[Layer]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    unique = {layer.path: layer for layers in gathered for layer in layers}
    return sorted(unique.values(), key=lambda layer: (layer.block, layer.path))
