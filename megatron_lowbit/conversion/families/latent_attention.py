"""Multi-latent attention: DeepSeek-V2 and V3, and Youtu, which has no experts.

Both sides have rotary dimensions in pairs and parts of heads in the same order.
"""

from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families.dense import LLAMA, MLP
from megatron_lowbit.conversion.families.experts import (
    ROUTED_EXPERTS,
    ROUTER_ARGUMENTS,
    ROUTER_ENTRIES,
    dense_or_experts,
    layers_with_experts,
    router_arguments,
    router_entries,
)
from megatron_lowbit.conversion.families.rope import (
    rope_entries,
    scaled_rope,
    yarn_scale_entries,
    yarn_scales,
)
from megatron_lowbit.conversion.family import Entry, check_arguments, integer, query_groups
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import require
from megatron_lowbit.json_files import Entries

_EPSILON = 1e-6
"""Epsilon of all norms: transformers fixes it for the norms of latents."""
_OTHERS = ("kv_channels", "layernorm_epsilon", "rotary_seq_len_interpolation_factor")
"""Arguments that entries of a Llama hold, and of this family not."""
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
"""Values of YaRN that Megatron-LM's arguments cannot change."""
_ATTENTION = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
}


def _latent_arguments(entries: Entries) -> dict[str, Any]:
    heads, groups = entries.integer("num_attention_heads"), query_groups(entries)
    require(groups == heads, f"{CONFIG}: num_key_value_heads {groups}: must be {heads}, all heads")
    return {
        "num_query_groups": heads,
        "kv_channels": entries.integer("v_head_dim", 128),  # Latent attention does not use it.
        **_rope_scaling(entries),
    }


def _rope_scaling(entries: Entries) -> dict[str, Any]:
    yarn = scaled_rope(rope_entries(entries), "yarn", _YARN)
    rope_type, factor, scales = "rope", 1.0, {"mscale": 1.0, "mscale_all_dim": 0.0}
    if yarn is not None:
        require(yarn.boolean("truncate", True), f"{CONFIG}: truncate: Megatron-LM's YaRN truncates")
        rope_type, factor, scales = "yarn", yarn.number("factor", above=0), yarn_scales(yarn)
    return {"rope_type": rope_type, "rotary_scaling_factor": factor, **scales}


def _rope_scaling_entry(model: Model) -> dict[str, Any]:
    if model["rope_type"] == "rope":
        check_arguments(model, DEEPSEEK_V3.name, {"rotary_scaling_factor": 1.0})
        return {"rope_scaling": None}
    factor, scales = model["rotary_scaling_factor"], yarn_scale_entries(model)
    return {"rope_scaling": {"rope_type": "yarn", "factor": factor, **_YARN, **scales}}


YOUTU = LLAMA.variant(
    ("Youtu", "YoutuForCausalLM", "youtu"),
    without=_OTHERS,
    arguments={
        "position_embedding_type": "rope",
        "layernorm_epsilon": _EPSILON,
        "multi_latent_attention": True,
        "qk_layernorm": True,
    },
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": _EPSILON,
        "rope_interleave": True,
    },
    defaults={"q_lora_rank": 1536, "tie_word_embeddings": True},
    entries={
        "q_lora_rank": Entry(
            "q_lora_rank", lambda e: e.integer("q_lora_rank", 0, minimum=0) or None
        ),
        "kv_lora_rank": integer("kv_lora_rank", 512),
        "qk_head_dim": integer("qk_nope_head_dim", 128),
        "qk_pos_emb_head_dim": integer("qk_rope_head_dim", 64),
        "v_head_dim": integer("v_head_dim", 128),
    },
    layers={**_ATTENTION, **MLP},
    more_arguments=_latent_arguments,
    more_entries=_rope_scaling_entry,
)

DEEPSEEK_V3 = YOUTU.variant(
    ("DeepSeek-V3", "DeepseekV3ForCausalLM", "deepseek_v3"),
    arguments=ROUTER_ARGUMENTS,
    fixed={
        **YOUTU.fixed,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    defaults={
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    entries=ROUTER_ENTRIES,
    layers=dense_or_experts(_ATTENTION, ROUTED_EXPERTS),
    more_arguments=lambda entries: {**_latent_arguments(entries), **router_arguments(entries)},
    more_entries=lambda model: {**router_entries(model), **_rope_scaling_entry(model)},
)

DEEPSEEK_V2 = YOUTU.variant(
    ("DeepSeek-V2", "DeepseekV2ForCausalLM", "deepseek_v2"),
    arguments={"moe_router_pre_softmax": True},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": _EPSILON,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    defaults={"moe_intermediate_size": 1407, "n_shared_experts": 2, "q_lora_rank": 1536},
    entries={name: entry for name, entry in ROUTER_ENTRIES.items() if "group" not in name},
    layers=dense_or_experts(
        _ATTENTION,
        {key: names for key, names in ROUTED_EXPERTS.items() if "expert_bias" not in key},
    ),
    more_arguments=lambda entries: {**_latent_arguments(entries), **layers_with_experts(entries)},
    more_entries=lambda model: {
        **router_entries(model),
        **_rope_scaling_entry(model),
        "norm_topk_prob": False,
    },
)
