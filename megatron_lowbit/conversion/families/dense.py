"""Llama 2 and 3, Qwen3, Gemma 3's text models, and GPT-2.

A Gemma's norms multiply by 1 + w, its embeddings by the square root of the hidden size, and its
MLPs are gated by GELU. Gemma 3 with images (Gemma3ForConditionalGeneration) is not converted.
"""

import math
import reprlib
from dataclasses import replace
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.families.rope import (
    linear_factor,
    linear_scaling,
    rope_arguments,
    rope_entries,
    rope_entry,
    rope_type,
    rotary_base,
    scaled_rope,
)
from megatron_lowbit.conversion.family import (
    Entry,
    Family,
    integer,
    number_of_layers,
    positive_number,
    query_groups,
    untied,
    window,
    windows,
)
from megatron_lowbit.errors import require
from megatron_lowbit.json_files import Entries

OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attn.{q,k,v}_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
QWEN3_ATTENTION = {
    **ATTENTION,
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
MLP = {
    "mlp.linear_fc1.weight": "mlp.{gate,up}_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_GEMMA3_LAYER = {
    **QWEN3_ATTENTION,
    "self_attn_bda.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_feedforward_layernorm.weight",
    "mlp_bda.post_layernorm.weight": "post_feedforward_layernorm.weight",
    **MLP,
}
_TANH_GELU, _GELU = ("gelu_new", "gelu_pytorch_tanh"), "gelu"


def _head_dimension(entries: Entries) -> int:
    default = entries.integer("hidden_size") // entries.integer("num_attention_heads")
    return entries.integer("head_dim", default)


LLAMA = Family(
    name="Llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    arguments={
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": lambda model: "yarn" if "yarn_beta_fast" in model else "rope",
        "rotary_percent": 1.0,
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    entries={
        "num_layers": Entry("num_hidden_layers", number_of_layers),
        "hidden_size": integer("hidden_size"),
        "ffn_hidden_size": integer("intermediate_size"),
        "num_attention_heads": integer("num_attention_heads"),
        "num_query_groups": Entry("num_key_value_heads", query_groups),
        "kv_channels": Entry("head_dim", _head_dimension),
        "layernorm_epsilon": positive_number("rms_norm_eps", 1e-6),
        "rotary_base": rotary_base("rope_theta", 10_000),
        "rotary_seq_len_interpolation_factor": Entry(
            "rope_scaling", lambda entries: linear_factor(rope_entries(entries))
        ),
        "max_position_embeddings": integer("max_position_embeddings"),
        "untie_embeddings_and_output_weights": untied(False),
        "vocab_size": integer("vocab_size"),
    },
    outer=OUTER,
    layers={**ATTENTION, **MLP},
    more_arguments=rope_arguments,
    more_entries=rope_entry,
)

QWEN3 = replace(
    LLAMA,
    name="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    arguments={**LLAMA.arguments, "qk_layernorm": True},
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    entries={**LLAMA.entries, "kv_channels": integer("head_dim", 128)},
    layers={**QWEN3_ATTENTION, **MLP},
)


def _global_rope(entries: Entries) -> Entries:
    return entries.inner("rope_parameters").inner("full_attention")


def _window_rope(entries: Entries) -> Entries:
    rope = entries.inner("rope_parameters").inner("sliding_attention")
    message = f"{CONFIG}: sliding_attention: rope_type {rope_type(rope)!r} is not converted"
    require(rope_type(rope) == "default", message)
    return rope


def _linear_factor(entries: Entries) -> int | None:
    """Return the factor by which positions are divided in layers without a window."""
    rope = entries.inner("rope_scaling") or _global_rope(entries)
    scaled_rope(rope, "linear", {})
    return linear_factor(rope)


def _gemma3_windows(entries: Entries) -> list[bool]:
    """Return True for each layer with a window: by default all but every sixth."""
    step = entries.integer("sliding_window_pattern", 6)
    return [(layer + 1) % step != 0 for layer in range(number_of_layers(entries))]


def _gemma3_scale(entries: Entries) -> dict[str, Any]:
    """Return the scale of attention, as muP of no other width has it."""
    head, scalar = entries.integer("head_dim", 256), entries.integer("query_pre_attn_scalar", 256)
    return {"mup_base_head_dim": head / scalar}


GEMMA3 = Family(
    name="Gemma-3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={"num_key_value_heads": 4},
    arguments={
        **LLAMA.arguments,
        "position_embedding_type": "rope",
        "use_rope_scaling": None,
        "swiglu": False,
        "geglu": True,
        "sandwich_norm": True,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "use_mup": True,
        "mup_attn_scale_power": 0.5,
        "mup_embedding_mult": lambda model: math.sqrt(model["hidden_size"]),
    },
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    entries={
        **LLAMA.entries,
        "kv_channels": integer("head_dim", 256),
        "rotary_base": rotary_base("rope_theta", 1_000_000, _global_rope, "full_attention: "),
        "rotary_seq_len_interpolation_factor": Entry(
            "rope_scaling", _linear_factor, linear_scaling
        ),
        "window_rotary_base": rotary_base(
            "rope_local_base_freq", 10_000, _window_rope, "sliding_attention: "
        ),
        "untie_embeddings_and_output_weights": untied(True),
        "window_size": window(4096),
        "window_attn_skip_freq": windows(_gemma3_windows),
    },
    outer=OUTER,
    layers=_GEMMA3_LAYER,
    more_arguments=_gemma3_scale,
    more_entries=lambda model: {
        "query_pre_attn_scalar": round(model["kv_channels"] / model["mup_base_head_dim"])
    },
)


def _is_tanh_gelu(entries: Entries) -> bool:
    name, known = entries.string("activation_function", _TANH_GELU[0]), (*_TANH_GELU, _GELU)
    entry = f"{CONFIG}: activation_function {reprlib.repr(name)}"
    require(name in known, f"{entry}: Megatron-LM's GPT has {', '.join(map(repr, known))}")
    return name in _TANH_GELU


def _gpt2_heads(entries: Entries) -> int:
    hidden, heads = entries.integer("n_embd"), entries.integer("n_head")
    require(hidden % heads == 0, f"{CONFIG}: n_head {heads}: must divide n_embd {hidden}")
    return heads


GPT2 = Family(
    name="GPT-2",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    arguments={
        "swiglu": False,
        "squared_relu": False,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "num_query_groups": lambda model: model["num_attention_heads"],
        "kv_channels": lambda model: model["hidden_size"] // model["num_attention_heads"],
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    entries={
        "openai_gelu": Entry(
            "activation_function", _is_tanh_gelu, lambda tanh: _TANH_GELU[0] if tanh else _GELU
        ),
        "hidden_size": integer("n_embd"),
        "num_layers": integer("n_layer", maximum=MOST_LAYERS),
        "ffn_hidden_size": Entry(
            "n_inner", lambda entries: entries.integer("n_inner", 4 * entries.integer("n_embd"))
        ),
        "num_attention_heads": Entry("n_head", _gpt2_heads),
        "layernorm_epsilon": positive_number("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": integer("n_positions"),
        "untie_embeddings_and_output_weights": untied(True),
        "vocab_size": integer("vocab_size"),
    },
    outer={
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.final_layernorm.weight": "transformer.ln_f.weight",
        "decoder.final_layernorm.bias": "transformer.ln_f.bias",
        "output_layer.weight": "lm_head.weight",
    },
    layers={
        "self_attention.linear_qkv.weight": "attn.c_attn.weight",
        "self_attention.linear_qkv.bias": "attn.c_attn.bias",
        "self_attention.linear_proj.weight": "attn.c_proj.weight",
        "self_attention.linear_proj.bias": "attn.c_proj.bias",
        "mlp.linear_fc1.weight": "mlp.c_fc.weight",
        "mlp.linear_fc1.bias": "mlp.c_fc.bias",
        "mlp.linear_fc2.weight": "mlp.c_proj.weight",
        "mlp.linear_fc2.bias": "mlp.c_proj.bias",
        "self_attention.linear_qkv.layer_norm_weight": "ln_1.weight",
        "self_attention.linear_qkv.layer_norm_bias": "ln_1.bias",
        "mlp.linear_fc1.layer_norm_weight": "ln_2.weight",
        "mlp.linear_fc1.layer_norm_bias": "ln_2.bias",
    },
    prefix="transformer.h",
    is_transposed=True,
)
