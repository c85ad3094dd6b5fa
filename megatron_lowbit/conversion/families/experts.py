"""Models whose layers have experts, all or some of them: Mixtral, Qwen-MoE, gpt-oss and others.

A gpt-oss has experts with biases and a clamped activation, attention sinks, windows and YaRN.
Hugging Face stores its experts of a layer together, in BF16 or in MXFP4, which
``layouts/gpt_oss.py`` separates.

GLM-4.5-MoE, dots.llm1 and Solar Open have DeepSeek-V3's experts, with a sigmoid router, biases of
its choice and shared experts, after the attention of a Llama or Qwen3.
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
from megatron_lowbit.conversion.families.rope import rope_arguments, rope_entry, rotated_part
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
from megatron_lowbit.conversion.mapping import Model, Names, biases
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
_GPT_OSS_EXPERTS = EXPERTS | {"mlp.router.weight": "mlp.router.weight"}
_GPT_OSS_LAYER = {
    **ATTENTION,
    **ATTENTION_BIASES,
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    **_GPT_OSS_EXPERTS,
    **biases(_GPT_OSS_EXPERTS),
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


def _sparse_layers(entries: Entries) -> int | list[int]:
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


def _sparse_entries(model: Model) -> dict[str, Any]:
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
        "moe_layer_freq": _sparse_layers(entries),
    },
    more_entries=_sparse_entries,
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

ROUTED_EXPERTS = {
    **EXPERTS,
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts.{gate,up}_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
_ROUTED_COUNT = experts("n_routed_experts")
_ROUTED_OF_A_TOKEN = experts_of_a_token(_ROUTED_COUNT)


def _groups(entries: Entries) -> int:
    """Return the number of groups of experts."""
    count, groups = _ROUTED_COUNT.read(entries), entries.integer("n_group", 1)
    rule = f"must divide n_routed_experts {count} into groups of two or more"
    require(count % groups == 0 and groups < count, f"{CONFIG}: n_group {groups}: {rule}")
    return groups


def _groups_of_a_token(entries: Entries) -> int:
    groups, of_a_token = _groups(entries), _ROUTED_OF_A_TOKEN.read(entries)
    chosen = entries.integer("topk_group", 1, maximum=groups)
    room = chosen * (_ROUTED_COUNT.read(entries) // groups)
    require(
        of_a_token <= room,
        f"{CONFIG}: num_experts_per_tok {of_a_token}: topk_group {chosen} groups have {room}",
    )
    _check_choice(f"{CONFIG}: topk_group {chosen}", groups, chosen, of_a_token)
    return chosen


def _check_choice(subject: str, groups: int, chosen: int, of_a_token: int) -> None:
    """Raise UserError where transformers and Megatron-LM choose other groups of experts."""
    require(
        groups == chosen or of_a_token // chosen == 2,
        f"{subject}: Megatron-LM scores a group by its best num_experts_per_tok // topk_group "
        "experts, transformers by its best two",
    )


def _shared_width(entries: Entries) -> int:
    return entries.integer("n_shared_experts") * entries.integer("moe_intermediate_size")


ROUTER_ARGUMENTS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
ROUTER_ENTRIES = {
    "num_experts": _ROUTED_COUNT,
    "moe_router_topk": _ROUTED_OF_A_TOKEN,
    "moe_ffn_hidden_size": integer("moe_intermediate_size"),
    "moe_router_num_groups": Entry("n_group", _groups, lambda groups: groups or 1),
    "moe_router_group_topk": Entry("topk_group", _groups_of_a_token),
    "moe_router_topk_scaling_factor": positive_number("routed_scaling_factor", 1.0)._replace(
        write=lambda factor: factor or 1.0
    ),
    "moe_shared_expert_intermediate_size": Entry("n_shared_experts", _shared_width),
}


def layers_with_experts(entries: Entries) -> dict[str, Any]:
    """Return the argument for the layers with experts, all behind those with a dense MLP."""
    layers = number_of_layers(entries)
    dense = entries.integer("first_k_dense_replace", 0, minimum=0, maximum=layers)
    return {"moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1}


def router_arguments(entries: Entries) -> dict[str, Any]:
    """Return the layers with experts, and check that scores are normalized as in Megatron-LM."""
    normalized = entries.boolean("norm_topk_prob")
    require(
        normalized == (_ROUTED_OF_A_TOKEN.read(entries) > 1),
        f"{CONFIG}: norm_topk_prob {normalized}: Megatron-LM normalizes the scores of a token's "
        "experts if these are several",
    )
    return layers_with_experts(entries)


def router_entries(model: Model) -> dict[str, Any]:
    """Return entries that are made of several arguments, or that need a check."""
    of_a_token, width = model["moe_router_topk"], model["moe_ffn_hidden_size"]
    groups, chosen = model.get("moe_router_num_groups", 1), model.get("moe_router_group_topk", 0)
    subject = f"the model has moe_router_group_topk {chosen}"
    _check_choice(subject, groups, chosen or groups, of_a_token)
    shared = model.get("moe_shared_expert_intermediate_size", 0)
    require(
        shared > 0 and shared % width == 0,
        f"the model has moe_shared_expert_intermediate_size {shared}; its family has a multiple of "
        f"moe_ffn_hidden_size {width}",
    )
    frequency = model["moe_layer_freq"]
    pattern = [1] * model["num_layers"] if frequency == 1 else frequency
    require(
        pattern == sorted(pattern),
        f"the model has moe_layer_freq {pattern}; its family has its dense layers first",
    )
    return {
        "n_shared_experts": shared // width,
        "topk_group": chosen or groups,
        "norm_topk_prob": of_a_token > 1,
        "first_k_dense_replace": pattern.count(0),
        "num_nextn_predict_layers": 0,
    }


_ROUTED_LLAMA = LLAMA.variant(
    arguments=ROUTER_ARGUMENTS,
    entries=ROUTER_ENTRIES,
    more_arguments=lambda entries: {**rope_arguments(entries), **router_arguments(entries)},
    more_entries=lambda model: {**rope_entry(model), **router_entries(model)},
)
_ROUTER_DEFAULTS = {
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}

GLM4_MOE = _ROUTED_LLAMA.variant(
    ("GLM-4.5-MoE", "Glm4MoeForCausalLM", "glm4_moe"),
    fixed={"hidden_act": "silu"},
    defaults={**_ROUTER_DEFAULTS, "first_k_dense_replace": 1},
    entries={
        "add_qkv_bias": boolean("attention_bias", False),
        "qk_layernorm": boolean("use_qk_norm", False),
        "rotary_percent": rotated_part(0.5),
    },
    layers=dense_or_experts({**QWEN3_ATTENTION, **QKV_BIAS}, ROUTED_EXPERTS),
)

SOLAR_OPEN = _ROUTED_LLAMA.variant(
    ("Solar-Open", "SolarOpenForCausalLM", "solar_open"),
    fixed={"hidden_act": "silu", "first_k_dense_replace": 0},
    defaults={
        **_ROUTER_DEFAULTS,
        "head_dim": 128,
        "moe_intermediate_size": 1280,
        "rope_theta": 1_000_000,
    },
    entries={
        "ffn_hidden_size": integer("moe_intermediate_size"),  # No layer uses it.
        "add_qkv_bias": boolean("attention_bias", False),
    },
    layers={**ATTENTION, **QKV_BIAS, **ROUTED_EXPERTS},
)


def _dots_windows(entries: Entries) -> list[bool]:
    """Return True for each layer with a window by dots.llm1's older entry."""
    first = entries.integer("max_window_layers", 62, minimum=0)
    has_window = entries.integer("sliding_window", 0, minimum=0) > 0
    return [has_window and layer >= first for layer in range(number_of_layers(entries))]


DOTS1 = _ROUTED_LLAMA.variant(
    ("dots.llm1", "Dots1ForCausalLM", "dots1"),
    arguments={"qk_layernorm": True},
    fixed={"hidden_act": "silu", "attention_bias": False},
    defaults={"norm_topk_prob": False, "num_key_value_heads": 32, "sliding_window": 4096},
    entries={
        "window_size": window(),
        "window_attn_skip_freq": windows(_dots_windows),
    },
    layers=dense_or_experts(QWEN3_ATTENTION, ROUTED_EXPERTS),
)
