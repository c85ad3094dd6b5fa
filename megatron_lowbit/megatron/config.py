"""megatron-core's configuration of a model, from parsed arguments."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.activations import squared_relu
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.megatron.rope import use_fused_rope


def transformer_config(args: Namespace, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of the model that the arguments describe."""
    cuda = torch.cuda.is_available()
    if cuda and args.transformer_impl != "transformer_engine":
        use_fused_rope()
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        normalization="RMSNorm" if args.normalization == "MXNorm" else args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=not args.disable_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=_activation(args),
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
        **_hybrid_config(args),
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


def _activation(args: Namespace) -> Callable[[Tensor], Tensor]:
    """What the MLPs compute between their linear layers."""
    if args.swiglu:
        return F.silu
    if args.squared_relu:
        return squared_relu
    return _tanh_gelu if args.openai_gelu else F.gelu


def _tanh_gelu(x: Tensor) -> Tensor:
    """GELU with its Gaussian integral approximated by tanh, in x's shape and dtype."""
    return F.gelu(x, approximate="tanh")


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


def _hybrid_config(args: Namespace) -> dict[str, Any]:
    """What the configuration says about Mamba blocks; nothing for a GPT."""
    if args.hybrid_override_pattern is None:
        return {}
    return {
        "is_hybrid_model": True,
        "mamba_state_dim": args.mamba_state_dim,
        "mamba_head_dim": args.mamba_head_dim,
        "mamba_num_groups": args.mamba_num_groups,
        "mamba_num_heads": args.mamba_num_heads,
    }


def _activation_fuses(args: Namespace) -> bool:
    """Whether megatron-core's fused bias and activation has this one, also in experts."""
    if args.num_experts is not None:
        return args.swiglu and args.disable_bias_linear
    return not (args.squared_relu or args.openai_gelu)
