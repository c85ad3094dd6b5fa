"""Mixtral, Qwen3-MoE and gpt-oss: a Llama or Qwen3 of which all or some layers have experts.

A gpt-oss has experts with biases and a clamped activation, attention sinks, windows and YaRN.
Hugging Face stores its experts of a layer together, in BF16 or in MXFP4, which
``layouts/gpt_oss.py`` separates.
"""

from collections.abc import Callable, Sequence
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families.dense import (
    ALL_WINDOWS,
    ATTENTION,
    ATTENTION_BIASES,
    LLAMA,
    MLP,
    QKV_BIAS,
    QWEN3,
    QWEN3_ATTENTION,
    QWEN_WINDOWS,
)
from megatron_lowbit.conversion.families.rope import rope_arguments
from megatron_lowbit.conversion.family import (
    Entry,
    boolean,
    experts,
    experts_of_a_token,
    integer,
    number_of_layers,
    positive_number,
    window,
    windows,
)
from megatron_lowbit.conversion.mapping import Model, Names
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
    **ATTENTION_BIASES,
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    **EXPERTS,
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.experts.experts.*.linear_fc1.bias": "mlp.experts.*.{gate,up}_proj.bias",
    "mlp.experts.experts.*.linear_fc2.bias": "mlp.experts.*.down_proj.bias",
}


def dense_or_experts(
    attention: Names, experts: Names
) -> Callable[[Model], Names | Sequence[Names]]:
    """Return :attr:`Family.layers` of models whose layers have experts or a dense MLP."""

    def layers(model: Model) -> Names | list[Names]:
        both = {**attention, **MLP}, {**attention, **experts}
        frequency = model["moe_layer_freq"]
        return both[1] if frequency == 1 else [both[has] for has in frequency]

    return layers


_LOCAL_COUNT = experts("num_local_experts")
MIXTRAL = LLAMA.variant(
    ("Mixtral", "MixtralForCausalLM", "mixtral"),
    arguments={
        **ALL_WINDOWS,
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
    },
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000},
    entries={
        "num_experts": _LOCAL_COUNT,
        "moe_router_topk": experts_of_a_token(_LOCAL_COUNT, minimum=2),
        "moe_ffn_hidden_size": integer("intermediate_size"),
        "window_size": window(),
    },
    layers={**ATTENTION, **_MIXTRAL_EXPERTS},
)

_COUNT = experts("num_experts", "num_local_experts")  # transformers' older and newer name
_OF_A_TOKEN = experts_of_a_token(_COUNT)


def _layers_with_experts(entries: Entries) -> int | list[int]:
    """Return 1 if all layers have experts, else 1 or 0 for each layer."""
    layers = number_of_layers(entries)
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


def _more_entries(model: Model) -> dict[str, Any]:
    pattern = [] if model["moe_layer_freq"] == 1 else model["moe_layer_freq"]
    dense = [layer for layer, has_experts in enumerate(pattern) if not has_experts]
    return {**LLAMA.more_entries(model), "decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN3_MOE = QWEN3.variant(
    ("Qwen3-MoE", "Qwen3MoeForCausalLM", "qwen3_moe"),
    without=QWEN_WINDOWS,
    fixed={**QWEN3.fixed, "use_sliding_window": False},
    defaults={"num_key_value_heads": 4},
    entries={
        "kv_channels": LLAMA.entries["kv_channels"],
        "num_experts": _COUNT,
        "moe_router_topk": _OF_A_TOKEN,
        "moe_router_pre_softmax": Entry(
            "norm_topk_prob", _is_softmax_of_all, lambda of_all: not of_all
        ),
        "moe_ffn_hidden_size": integer("moe_intermediate_size", 768),
    },
    layers=dense_or_experts(QWEN3_ATTENTION, EXPERTS),
    more_arguments=lambda entries: {
        **LLAMA.more_arguments(entries),
        "moe_layer_freq": _layers_with_experts(entries),
    },
    more_entries=_more_entries,
)


QWEN2_MOE = QWEN3_MOE.variant(
    ("Qwen2-MoE", "Qwen2MoeForCausalLM", "qwen2_moe"),
    without=["qk_layernorm"],
    arguments={"moe_shared_expert_gate": True},
    fixed={"hidden_act": "silu", "use_sliding_window": False},
    defaults={"num_key_value_heads": 16, "moe_intermediate_size": 1408},
    entries={
        "add_qkv_bias": boolean("qkv_bias", True),
        "moe_shared_expert_intermediate_size": integer("shared_expert_intermediate_size", 5632),
    },
    layers=dense_or_experts(
        {**ATTENTION, **QKV_BIAS},
        {
            **EXPERTS,
            "mlp.shared_experts.linear_fc1.weight": "mlp.shared_expert.{gate,up}_proj.weight",
            "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
            "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        },
    ),
)

GPT_OSS = MIXTRAL.variant(
    ("gpt-oss", "GptOssForCausalLM", "gpt_oss"),
    arguments={
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "position_embedding_type": "yarn",
    },
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
    },
    entries={
        "activation_func_clamp_value": positive_number("swiglu_limit", 7.0),
        "window_size": window(128),
        "window_attn_skip_freq": windows(
            lambda entries: [layer % 2 == 0 for layer in range(number_of_layers(entries))]
        ),
    },
    layers=_GPT_OSS_LAYER,
    more_arguments=lambda entries: rope_arguments(entries, "yarn"),
)
