"""Llama 2 and 3: Hugging Face's LlamaForCausalLM and Megatron-LM's GPT."""

from collections.abc import Mapping
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.family import (
    Entry,
    Family,
    integer,
    positive_number,
    query_groups,
    untied,
)
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

LLAMA3_ROPE = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Values of Llama 3.1's scaling of frequencies that megatron-core fixes."""

ATTENTION = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": (
        "model.layers.*.input_layernorm.weight"
    ),
    "decoder.layers.*.self_attention.linear_qkv.weight": (
        "model.layers.*.self_attn.q_proj.weight",
        "model.layers.*.self_attn.k_proj.weight",
        "model.layers.*.self_attn.v_proj.weight",
    ),
    "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": (
        "model.layers.*.post_attention_layernorm.weight"
    ),
}
MLP = {
    "decoder.layers.*.mlp.linear_fc1.weight": (
        "model.layers.*.mlp.gate_proj.weight",
        "model.layers.*.mlp.up_proj.weight",
    ),
    "decoder.layers.*.mlp.linear_fc2.weight": "model.layers.*.mlp.down_proj.weight",
}
OUTPUT = {
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def rope(entries: Entries) -> Entries:
    """Return the entries of rotary embeddings, under their newer or their older name."""
    return entries.inner("rope_parameters") or entries.inner("rope_scaling")


def _rotary_base(entries: Entries) -> int:
    # Beside the older entries the base is an entry of its own.
    base = rope(entries).number("rope_theta", entries.number("rope_theta", 10000), above=1)
    require(base.is_integer(), f"{CONFIG}: rope_theta {base}: Megatron-LM's is an integer")
    return int(base)


def scaled_rope(entries: Entries, kind: str, fixed: Mapping[str, float]) -> Entries | None:
    """Return the entries of rotary embeddings whose frequencies are scaled; None without scaling.

    Raises UserError for another kind of scaling, or values other than those that megatron-core has.
    """
    scaling = rope(entries)
    actual = scaling.string("rope_type", scaling.string("type", "default"))
    if actual == "default":
        return None
    if actual != kind:
        raise UserError(f"{CONFIG}: rope_type {actual!r}: only {kind!r} is converted")
    for key, value in fixed.items():
        if scaling.number(key) != value:
            raise UserError(f"{CONFIG}: {key} {scaling.number(key)}: megatron-core's is {value!r}")
    return scaling


def _rope_scaling(entries: Entries) -> dict[str, Any]:
    scaling = scaled_rope(entries, "llama3", LLAMA3_ROPE)
    if scaling is None:
        return {}
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor", above=0)}


def _rope_scaling_entry(model: Model) -> dict[str, Any]:
    if not model.get("use_rope_scaling"):
        return {"rope_scaling": None}
    factor = model["rope_scaling_factor"]
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}}


def _head_dimension(entries: Entries) -> int:
    return entries.integer("hidden_size") // entries.integer("num_attention_heads")


FAMILY = Family(
    name="Llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    arguments={
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    entries={
        "num_layers": integer("num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": integer("hidden_size"),
        "ffn_hidden_size": integer("intermediate_size"),
        "num_attention_heads": integer("num_attention_heads"),
        "num_query_groups": Entry("num_key_value_heads", query_groups),
        "kv_channels": integer("head_dim", _head_dimension),
        "layernorm_epsilon": positive_number("rms_norm_eps", 1e-6),
        "rotary_base": Entry("rope_theta", _rotary_base, float),
        "max_position_embeddings": integer("max_position_embeddings"),
        "untie_embeddings_and_output_weights": untied(False),
        "vocab_size": integer("vocab_size"),
    },
    tensors=lambda model: {**ATTENTION, **MLP, **OUTPUT},
    more_arguments=_rope_scaling,
    more_entries=_rope_scaling_entry,
)
