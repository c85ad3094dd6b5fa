"""Gemma 1, and Gemma 3's text models.

Their norms multiply by 1 + w, their embeddings by the square root of the hidden size, and their
MLPs are gated by GELU.
"""

import math
import reprlib
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families.dense import LLAMA, MLP, QWEN3_ATTENTION
from megatron_lowbit.conversion.families.rope import (
    linear_factor,
    linear_scaling,
    rope_type,
    rotary_base,
    scaled_rope,
)
from megatron_lowbit.conversion.family import (
    Entry,
    integer,
    number_of_layers,
    untied,
    window,
    windows,
)
from megatron_lowbit.errors import require
from megatron_lowbit.json_files import Entries

_GEMMA3_LAYER = {
    **QWEN3_ATTENTION,
    "self_attn_bda.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_feedforward_layernorm.weight",
    "mlp_bda.post_layernorm.weight": "post_feedforward_layernorm.weight",
    **MLP,
}


def _is_geglu(entries: Entries) -> bool:
    """Return True for the tanh approximation, which Gemma's older files call gelu."""
    key, names = "hidden_act", ("gelu_pytorch_tanh", "gelu")
    actual = entries.string(key, names[0])
    message = f"{CONFIG}: {key} {reprlib.repr(actual)}: only {names[0]!r} is converted"
    require(actual in names, message)
    return True


_ARGUMENTS = {
    "swiglu": False,
    "geglu": True,
    "layernorm_zero_centered_gamma": True,
    "use_mup": True,
    "mup_attn_scale_power": 0.5,
    "mup_embedding_mult": lambda model: math.sqrt(model["hidden_size"]),
}
GEMMA = LLAMA.variant(
    ("Gemma", "GemmaForCausalLM", "gemma"),
    defaults={"num_key_value_heads": 16},
    arguments={**_ARGUMENTS, "mup_base_head_dim": 1.0},
    fixed={"attention_bias": False, "use_bidirectional_attention": None},
    entries={
        "geglu": Entry("hidden_act", _is_geglu, lambda _: "gelu_pytorch_tanh"),
        "kv_channels": integer("head_dim", 256),
        "untie_embeddings_and_output_weights": untied(True),
    },
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


GEMMA3 = LLAMA.variant(
    ("Gemma-3", "Gemma3ForCausalLM", "gemma3_text"),
    defaults={
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
    },
    arguments={
        **_ARGUMENTS,
        "position_embedding_type": "rope",
        "use_rope_scaling": None,
        "sandwich_norm": True,
        "qk_layernorm": True,
    },
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    entries={
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
    layers=_GEMMA3_LAYER,
    more_arguments=_gemma3_scale,
    more_entries=lambda model: {
        "query_pre_attn_scalar": round(model["kv_channels"] / model["mup_base_head_dim"])
    },
)
