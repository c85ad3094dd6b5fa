"""Llama 2 and 3, Qwen3, Gemma 3's text models, and GPT-2.

A Gemma's norms multiply by 1 + w, its embeddings by the square root of the hidden size, and its
MLPs are gated by GELU. Gemma 3 with images (Gemma3ForConditionalGeneration) is not converted.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.family import (
    Entry,
    Family,
    check_arguments,
    check_window,
    integer,
    layers_with_windows,
    positive_number,
    query_groups,
    untied,
    window,
    windows,
)
from megatron_lowbit.conversion.mapping import Model, TensorTable
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

EMBEDDING = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
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
OUTPUT = {
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_GEMMA3_LAYER = {
    **QWEN3_ATTENTION,
    "self_attn_bda.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_feedforward_layernorm.weight",
    "mlp_bda.post_layernorm.weight": "post_feedforward_layernorm.weight",
    **MLP,
}
_GPT2 = TensorTable(
    before={
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
    after={},
    prefix="transformer.h",
)
LLAMA3_ROPE = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Values of Llama 3.1's scaling of frequencies that megatron-core fixes."""
_GLOBAL_BASE, _WINDOW_BASE = 1_000_000, 10_000
_TANH_GELU, _GELU = ("gelu_new", "gelu_pytorch_tanh"), "gelu"


def rope_entries(entries: Entries) -> Entries:
    """Return the entries of rotary embeddings, under their newer or their older name."""
    return entries.inner("rope_parameters") or entries.inner("rope_scaling")


def scaled_rope(entries: Entries, kind: str, fixed: Mapping[str, float]) -> Entries | None:
    """Return the entries of rotary embeddings whose frequencies are scaled; None without scaling.

    Raises UserError for another kind of scaling, or values other than those that megatron-core has.
    """
    scaling = rope_entries(entries)
    actual = scaling.string("rope_type", scaling.string("type", "default"))
    if actual == "default":
        return None
    require(actual == kind, f"{CONFIG}: rope_type {actual!r}: only {kind!r} is converted")
    for key, value in fixed.items():
        if scaling.number(key) != value:
            raise UserError(f"{CONFIG}: {key} {scaling.number(key)}: megatron-core's is {value!r}")
    return scaling


def _base(rope: Entries, default: float, place: str = "") -> int:
    """Return the rotary base; ``default`` is its value where it is no entry of ``rope``."""
    base = rope.number("rope_theta", default, above=1)
    message = f"{CONFIG}: {place}rope_theta {base}: Megatron-LM's is an integer"
    require(base.is_integer(), message)
    return int(base)


def _rotary_base(entries: Entries) -> int:
    # Beside the older entries the base is an entry of its own.
    return _base(rope_entries(entries), entries.number("rope_theta", 10000))


def _llama_scaling(entries: Entries) -> dict[str, Any]:
    scaling = scaled_rope(entries, "llama3", LLAMA3_ROPE)
    if scaling is None:
        return {}
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor", above=0)}


def _llama_scaling_entry(model: Model) -> dict[str, Any]:
    if not model.get("use_rope_scaling"):
        return {"rope_scaling": None}
    factor = model["rope_scaling_factor"]
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}}


def _head_dimension(entries: Entries) -> int:
    return entries.integer("hidden_size") // entries.integer("num_attention_heads")


LLAMA = Family(
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
    tensors=lambda model: TensorTable(EMBEDDING, ATTENTION | MLP, OUTPUT),
    more_arguments=_llama_scaling,
    more_entries=_llama_scaling_entry,
)

QWEN3 = replace(
    LLAMA,
    name="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    arguments={**LLAMA.arguments, "qk_layernorm": True},
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    entries={**LLAMA.entries, "kv_channels": integer("head_dim", 128)},
    tensors=lambda model: TensorTable(EMBEDDING, QWEN3_ATTENTION | MLP, OUTPUT),
)


def _kind_of_layers(entries: Entries, kind: str) -> Entries:
    """Return the entries of the rotary embeddings of Gemma's layers of a kind."""
    return entries.inner("rope_parameters").inner(kind)


def _global_base(entries: Entries) -> int:
    kind, default = "full_attention", entries.number("rope_theta", _GLOBAL_BASE)
    return _base(_kind_of_layers(entries, kind), default, f"{kind}: ")


def _window_base(entries: Entries) -> int:
    kind, default = "sliding_attention", entries.number("rope_local_base_freq", _WINDOW_BASE)
    rope = _kind_of_layers(entries, kind)
    base, rope_type = _base(rope, default, f"{kind}: "), rope.string("rope_type", "default")
    require(rope_type == "default", f"{CONFIG}: {kind}: rope_type {rope_type!r} is not converted")
    return base


def _linear_factor(entries: Entries) -> int | None:
    """Return the factor by which positions are divided in layers without a window."""
    scaling = entries.inner("rope_scaling") or _kind_of_layers(entries, "full_attention")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind == "default":
        return None
    require(kind == "linear", f"{CONFIG}: rope_type {kind!r}: only 'linear' is converted")
    factor = scaling.number("factor", above=1)
    require(factor.is_integer(), f"{CONFIG}: factor {factor}: Megatron-LM's is an integer")
    return int(factor)


def _linear_scaling(factor: int | None) -> dict[str, Any] | None:
    return {"rope_type": "linear", "factor": float(factor)} if factor else None


def _gemma3_windows(entries: Entries) -> list[int]:
    """Return 1 for each layer with a window, 0 for the others; by default every sixth."""
    if entries.strings("layer_types"):
        return layers_with_windows(entries)
    step = entries.integer("sliding_window_pattern", 6)
    layers = entries.integer("num_hidden_layers", most=MOST_LAYERS)
    return [int((layer + 1) % step != 0) for layer in range(layers)]


def _gemma3_scales(entries: Entries) -> dict[str, Any]:
    """Return the scales of embeddings and of attention, as muP of no other width has them."""
    head, scalar = entries.integer("head_dim", 256), entries.integer("query_pre_attn_scalar", 256)
    return {
        "mup_embedding_mult": math.sqrt(entries.integer("hidden_size")),
        "mup_base_head_dim": head / scalar,
    }


def _gemma3_entries(model: Model) -> dict[str, Any]:
    check_arguments(model, GEMMA3.name, {"mup_embedding_mult": math.sqrt(model["hidden_size"])})
    check_window(model, GEMMA3.name)
    return {"query_pre_attn_scalar": round(model["kv_channels"] / model["mup_base_head_dim"])}


GEMMA3 = Family(
    name="Gemma-3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={"num_key_value_heads": 4},
    arguments={
        **LLAMA.arguments,
        "swiglu": False,
        "geglu": True,
        "sandwich_norm": True,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "use_mup": True,
        "mup_attn_scale_power": 0.5,
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
        "rotary_base": Entry("rope_theta", _global_base, float),
        "rotary_seq_len_interpolation_factor": Entry(
            "rope_scaling", _linear_factor, _linear_scaling
        ),
        "window_rotary_base": Entry("rope_local_base_freq", _window_base, float),
        "untie_embeddings_and_output_weights": untied(True),
        "window_size": window(4096),
        "window_attn_skip_freq": windows(_gemma3_windows),
    },
    tensors=lambda model: TensorTable(EMBEDDING, _GEMMA3_LAYER, OUTPUT),
    more_arguments=_gemma3_scales,
    more_entries=_gemma3_entries,
)


def _is_tanh_gelu(entries: Entries) -> bool:
    name, known = entries.string("activation_function", _TANH_GELU[0]), (*_TANH_GELU, _GELU)
    place = f"{CONFIG}: activation_function {reprlib.repr(name)}"
    require(name in known, f"{place}: Megatron-LM's GPT has {', '.join(map(repr, known))}")
    return name in _TANH_GELU


def _gpt2_heads(entries: Entries) -> dict[str, Any]:
    hidden, heads = entries.integer("n_embd"), entries.integer("n_head")
    require(hidden % heads == 0, f"{CONFIG}: n_head {heads}: must divide n_embd {hidden}")
    return {"num_query_groups": heads, "kv_channels": hidden // heads}


def _check_gpt2_heads(model: Model) -> dict[str, Any]:
    heads = model["num_attention_heads"]
    wanted = {"num_query_groups": heads, "kv_channels": model["hidden_size"] // heads}
    check_arguments(model, GPT2.name, wanted)
    return {}


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
        "num_layers": integer("n_layer", most=MOST_LAYERS),
        "ffn_hidden_size": integer("n_inner", lambda entries: 4 * entries.integer("n_embd")),
        "num_attention_heads": integer("n_head"),
        "layernorm_epsilon": positive_number("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": integer("n_positions"),
        "untie_embeddings_and_output_weights": untied(True),
        "vocab_size": integer("vocab_size"),
    },
    tensors=lambda model: _GPT2,
    is_transposed=True,
    more_arguments=_gpt2_heads,
    more_entries=_check_gpt2_heads,
)
