"""Mixtral, Qwen3-MoE and gpt-oss: a Llama or Qwen3 of which all or some layers have experts.

A gpt-oss has experts with biases and a clamped activation, attention sinks, windows and YaRN.
Hugging Face stores its experts of a layer together, in BF16 or in MXFP4, which
``layouts/gpt_oss.py`` takes apart.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.families.dense import (
    ATTENTION,
    EMBEDDING,
    LLAMA,
    MLP,
    OUTPUT,
    QWEN3,
    QWEN3_ATTENTION,
    scaled_rope,
)
from megatron_lowbit.conversion.family import (
    Entry,
    check_window,
    experts,
    experts_of_a_token,
    integer,
    layers_with_windows,
    positive_number,
    window,
    windows,
)
from megatron_lowbit.conversion.mapping import Model, TensorTable
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

_MIXTRAL_EXPERTS = {
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.experts.*.linear_fc1.weight": "block_sparse_moe.experts.*.{w1,w3}.weight",
    "mlp.experts.experts.*.linear_fc2.weight": "block_sparse_moe.experts.*.w2.weight",
}
EXPERTS = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.experts.*.linear_fc1.weight": "mlp.experts.*.{gate,up}_proj.weight",
    "mlp.experts.experts.*.linear_fc2.weight": "mlp.experts.*.down_proj.weight",
}
_GPT_OSS_LAYER = {
    **ATTENTION,
    "self_attention.linear_qkv.bias": "self_attn.{q,k,v}_proj.bias",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    "mlp.experts.experts.*.linear_fc1.weight": "mlp.experts.*.{gate,up}_proj.weight",
    "mlp.experts.experts.*.linear_fc2.weight": "mlp.experts.*.down_proj.weight",
    # Between weights and biases of experts, since a layer's weights are quantized together.
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.experts.experts.*.linear_fc1.bias": "mlp.experts.*.{gate,up}_proj.bias",
    "mlp.experts.experts.*.linear_fc2.bias": "mlp.experts.*.down_proj.bias",
}


def layers_of(
    model: Model, common: Mapping[str, str], dense: Mapping[str, str], experts: Mapping[str, str]
) -> Mapping[str, str] | list[Mapping[str, str]]:
    """Return :attr:`TensorTable.layers` of a model whose layers have experts or a dense MLP."""
    if model["moe_layer_freq"] == 1:
        return {**common, **experts}
    return [{**common, **(experts if has else dense)} for has in model["moe_layer_freq"]]


_LOCAL_COUNT = experts("num_local_experts")
MIXTRAL = replace(
    LLAMA,
    name="Mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    arguments={**LLAMA.arguments, "moe_layer_freq": 1, "moe_router_pre_softmax": False},
    fixed={**LLAMA.fixed, "sliding_window": None},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000},
    entries={
        **LLAMA.entries,
        "num_experts": _LOCAL_COUNT,
        "moe_router_topk": experts_of_a_token(_LOCAL_COUNT),
        "moe_ffn_hidden_size": integer("intermediate_size"),
    },
    tensors=lambda model: TensorTable(EMBEDDING, ATTENTION | _MIXTRAL_EXPERTS, OUTPUT),
)

# Its default is transformers' newer name.
_COUNT = experts(
    "num_experts", lambda entries: entries.integer("num_local_experts", 0, least=0) or None
)
_OF_A_TOKEN = experts_of_a_token(_COUNT)


def _layers_with_experts(entries: Entries) -> int | list[int]:
    """Return 1 if all layers have experts, else 1 or 0 for each layer."""
    layers = entries.integer("num_hidden_layers", most=MOST_LAYERS)
    step, dense = entries.integer("decoder_sparse_step", 1), entries.integers("mlp_only_layers")
    if unknown := [layer for layer in dense if not 0 <= layer < layers]:
        raise UserError(f"{CONFIG}: mlp_only_layers {unknown[0]}: the model has {layers} layers")
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    require(any(pattern), f"{CONFIG}: mlp_only_layers and decoder_sparse_step leave no experts")
    return 1 if all(pattern) else pattern


def _is_softmax_of_all(entries: Entries) -> bool:
    """Return True if probabilities are those among all experts, not among a token's."""
    normalized = entries.boolean("norm_topk_prob", False)
    require(
        not normalized or _OF_A_TOKEN.read(entries) > 1,
        f"{CONFIG}: norm_topk_prob: Megatron-LM does not normalize the probability of one expert",
    )
    return not normalized


def _dense_layers(model: Model) -> dict[str, Any]:
    frequency = model["moe_layer_freq"]
    pattern = [] if frequency == 1 else frequency
    dense = [layer for layer, has_experts in enumerate(pattern) if not has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={"num_key_value_heads": 4},
    entries={
        **LLAMA.entries,
        "num_experts": _COUNT,
        "moe_router_topk": _OF_A_TOKEN,
        "moe_router_pre_softmax": Entry(
            "norm_topk_prob", _is_softmax_of_all, lambda of_all: not of_all
        ),
        "moe_ffn_hidden_size": integer("moe_intermediate_size", 768),
    },
    tensors=lambda model: TensorTable(
        EMBEDDING, layers_of(model, QWEN3_ATTENTION, MLP, EXPERTS), OUTPUT
    ),
    more_arguments=lambda entries: {
        **LLAMA.more_arguments(entries),
        "moe_layer_freq": _layers_with_experts(entries),
    },
    more_entries=lambda model: {**LLAMA.more_entries(model), **_dense_layers(model)},
)


def _yarn(entries: Entries) -> dict[str, Any]:
    yarn = scaled_rope(entries, "yarn", {})
    if yarn is None:
        raise UserError(f"{CONFIG}: rope_type 'default': a gpt-oss has 'yarn'")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        require(yarn.number(key, 0.0) == 0, f"{CONFIG}: {key}: Megatron-LM derives it from factor")
    return {
        "rotary_scaling_factor": yarn.number("factor", above=0),
        "yarn_original_max_position_embeddings": yarn.integer("original_max_position_embeddings"),
        "yarn_beta_fast": yarn.number("beta_fast", 32.0, above=0),
        "yarn_beta_slow": yarn.number("beta_slow", 1.0, above=0),
        "yarn_correction_range_round_to_int": yarn.boolean("truncate", True),
    }


def _gpt_oss_entries(model: Model) -> dict[str, Any]:
    check_window(model, GPT_OSS.name)
    return {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": model["rotary_scaling_factor"],
            "original_max_position_embeddings": model["yarn_original_max_position_embeddings"],
            "beta_fast": model["yarn_beta_fast"],
            "beta_slow": model["yarn_beta_slow"],
            "truncate": model["yarn_correction_range_round_to_int"],
        }
    }


GPT_OSS = replace(
    MIXTRAL,
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    arguments={
        **MIXTRAL.arguments,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "position_embedding_type": "yarn",
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    },
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
    },
    entries={
        **MIXTRAL.entries,
        "activation_func_clamp_value": positive_number("swiglu_limit", 7.0),
        "window_size": window(128),
        "window_attn_skip_freq": windows(layers_with_windows),
    },
    tensors=lambda model: TensorTable(EMBEDDING, _GPT_OSS_LAYER, OUTPUT),
    more_arguments=_yarn,
    more_entries=_gpt_oss_entries,
)
