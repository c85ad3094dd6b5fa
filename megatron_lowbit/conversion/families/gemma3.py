"""Gemma 3's text models: norms before and after each part, windows with their own rotary base.

A Gemma's norms multiply by 1 + w, its embeddings by the square root of the hidden size, and its
MLPs are gated by GELU. The models with images keep their text model elsewhere
(Gemma3ForConditionalGeneration), and are not converted.
"""

import math
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.families import gpt_oss, llama, qwen3
from megatron_lowbit.conversion.family import (
    Entry,
    Family,
    check_arguments,
    integer,
    positive_number,
    untied,
)
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

_GLOBAL_BASE, _WINDOW_BASE = 1_000_000, 10_000
_TENSORS = {
    **qwen3.ATTENTION,
    "decoder.layers.*.self_attn_bda.post_layernorm.weight": (
        "model.layers.*.post_attention_layernorm.weight"
    ),
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": (
        "model.layers.*.pre_feedforward_layernorm.weight"
    ),
    "decoder.layers.*.mlp_bda.post_layernorm.weight": (
        "model.layers.*.post_feedforward_layernorm.weight"
    ),
    **llama.MLP,
    **llama.OUTPUT,
}


def _rope(entries: Entries, kind: str, older: str, default: int) -> tuple[int, Entries]:
    """Return a kind of layers' rotary base, and the entries of their rotary embeddings."""
    rope = entries.inner("rope_parameters").inner(kind)
    base = rope.number("rope_theta", entries.number(older, default), above=1)
    require(base.is_integer(), f"{CONFIG}: {kind}: rope_theta {base}: Megatron-LM's is an integer")
    return int(base), rope


def _global_base(entries: Entries) -> int:
    return _rope(entries, "full_attention", "rope_theta", _GLOBAL_BASE)[0]


def _window_base(entries: Entries) -> int:
    base, rope = _rope(entries, "sliding_attention", "rope_local_base_freq", _WINDOW_BASE)
    kind = rope.string("rope_type", "default")
    require(kind == "default", f"{CONFIG}: sliding_attention: rope_type {kind!r} is not converted")
    return base


def _linear_factor(entries: Entries) -> int | None:
    """Return the factor by which positions are divided in layers without a window."""
    scaling = entries.inner("rope_scaling")
    if not len(scaling):
        scaling = _rope(entries, "full_attention", "rope_theta", _GLOBAL_BASE)[1]
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind == "default":
        return None
    if kind != "linear":
        raise UserError(f"{CONFIG}: rope_type {kind!r}: only 'linear' is converted")
    factor = scaling.number("factor", above=1)
    require(factor.is_integer(), f"{CONFIG}: factor {factor}: Megatron-LM's is an integer")
    return int(factor)


def _linear_scaling(factor: int | None) -> dict[str, Any] | None:
    return {"rope_type": "linear", "factor": float(factor)} if factor else None


def _layers_with_windows(entries: Entries) -> list[int]:
    """Return 1 for each layer with a window, 0 for the others; by default every sixth."""
    layers = entries.integer("num_hidden_layers", most=MOST_LAYERS)
    if entries.strings("layer_types"):
        return gpt_oss.layers_with_windows(entries)
    step = entries.integer("sliding_window_pattern", 6)
    return [int((layer + 1) % step != 0) for layer in range(layers)]


def _scales(entries: Entries) -> dict[str, Any]:
    """Return the scales of embeddings and of attention, as muP of no other width has them."""
    head, scalar = entries.integer("head_dim", 256), entries.integer("query_pre_attn_scalar", 256)
    return {
        "mup_embedding_mult": math.sqrt(entries.integer("hidden_size")),
        "mup_base_head_dim": head / scalar,
    }


def _more_entries(model: Model) -> dict[str, Any]:
    """Return entries that are made of several arguments, or that need a check."""
    check_arguments(model, FAMILY.name, {"mup_embedding_mult": math.sqrt(model["hidden_size"])})
    gpt_oss.check_window(model, FAMILY.name)
    return {"query_pre_attn_scalar": round(model["kv_channels"] / model["mup_base_head_dim"])}


FAMILY = Family(
    name="Gemma-3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={"num_key_value_heads": 4},
    arguments={
        **llama.FAMILY.arguments,
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
        **llama.FAMILY.entries,
        "kv_channels": integer("head_dim", 256),
        "layernorm_epsilon": positive_number("rms_norm_eps", 1e-6),
        "rotary_base": Entry("rope_theta", _global_base, float),
        "rotary_seq_len_interpolation_factor": Entry(
            "rope_scaling", _linear_factor, _linear_scaling
        ),
        "window_rotary_base": Entry("rope_local_base_freq", _window_base, float),
        "untie_embeddings_and_output_weights": untied(True),
        "window_size": gpt_oss.window(4096),
        "window_attn_skip_freq": gpt_oss.windows(_layers_with_windows),
    },
    tensors=lambda model: _TENSORS,
    more_arguments=_scales,
    more_entries=_more_entries,
)
