"""Experts with a sigmoid router, biases of its choice and shared experts, as in DeepSeek-V3.

GLM-4.5-MoE, dots.llm1 and Solar Open have them after the attention of a Llama or Qwen3.
"""

from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families.dense import (
    ATTENTION,
    LLAMA,
    QKV_BIAS,
    QWEN3_ATTENTION,
)
from megatron_lowbit.conversion.families.experts import EXPERTS, dense_or_experts
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
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import require
from megatron_lowbit.json_files import Entries

ROUTED_EXPERTS = {
    **EXPERTS,
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts.{gate,up}_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
_COUNT = experts("n_routed_experts")
_OF_A_TOKEN = experts_of_a_token(_COUNT)


def _groups(entries: Entries) -> int:
    """Return the number of groups of experts."""
    count, groups = _COUNT.read(entries), entries.integer("n_group", 1)
    rule = f"must divide n_routed_experts {count} into groups of two or more"
    require(count % groups == 0 and groups < count, f"{CONFIG}: n_group {groups}: {rule}")
    return groups


def _groups_of_a_token(entries: Entries) -> int:
    groups, of_a_token = _groups(entries), _OF_A_TOKEN.read(entries)
    chosen = entries.integer("topk_group", 1, maximum=groups)
    room = chosen * (_COUNT.read(entries) // groups)
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
    "num_experts": _COUNT,
    "moe_router_topk": _OF_A_TOKEN,
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
        normalized == (_OF_A_TOKEN.read(entries) > 1),
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


def _last_layers(entries: Entries) -> list[bool]:
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
        "window_attn_skip_freq": windows(_last_layers),
    },
    layers=dense_or_experts(QWEN3_ATTENTION, ROUTED_EXPERTS),
)
