"""gpt-oss: experts with biases and a clamped activation, attention sinks and windows, YaRN.

Hugging Face stores the experts of a layer together, in BF16 or in MXFP4, which
``layouts/stacked_experts.py`` and ``layouts/gpt_oss.py`` take apart.
"""

from collections.abc import Callable
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.families import llama
from megatron_lowbit.conversion.family import (
    Entry,
    Family,
    experts,
    experts_of_a_token,
    integer,
    positive_number,
)
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

_WINDOW, _FULL = "sliding_attention", "full_attention"
_COUNT = experts("num_local_experts")
_TENSORS = {
    **llama.ATTENTION,
    "decoder.layers.*.self_attention.linear_qkv.bias": (
        "model.layers.*.self_attn.q_proj.bias",
        "model.layers.*.self_attn.k_proj.bias",
        "model.layers.*.self_attn.v_proj.bias",
    ),
    "decoder.layers.*.self_attention.linear_proj.bias": "model.layers.*.self_attn.o_proj.bias",
    "decoder.layers.*.self_attention.core_attention.softmax_offset": (
        "model.layers.*.self_attn.sinks"
    ),
    "decoder.layers.*.mlp.experts.experts.*.linear_fc1.weight": (
        "model.layers.*.mlp.experts.*.gate_proj.weight",
        "model.layers.*.mlp.experts.*.up_proj.weight",
    ),
    "decoder.layers.*.mlp.experts.experts.*.linear_fc2.weight": (
        "model.layers.*.mlp.experts.*.down_proj.weight"
    ),
    # Between weights and biases of experts, since a layer's weights are quantized together.
    "decoder.layers.*.mlp.router.weight": "model.layers.*.mlp.router.weight",
    "decoder.layers.*.mlp.router.bias": "model.layers.*.mlp.router.bias",
    "decoder.layers.*.mlp.experts.experts.*.linear_fc1.bias": (
        "model.layers.*.mlp.experts.*.gate_proj.bias",
        "model.layers.*.mlp.experts.*.up_proj.bias",
    ),
    "decoder.layers.*.mlp.experts.experts.*.linear_fc2.bias": (
        "model.layers.*.mlp.experts.*.down_proj.bias"
    ),
    **llama.OUTPUT,
}


def window(default: int) -> Entry:
    """Return the entry that is the number of tokens to attend to, with the token itself."""
    key = "sliding_window"
    return Entry(key, lambda entries: (entries.integer(key, default) - 1, 0), lambda w: w[0] + 1)


def windows(read: Callable[[Entries], list[int]]) -> Entry:
    """Return the entry that says which layers have a window, read as 1 or 0 for each layer."""
    return Entry("layer_types", read, lambda pattern: [(_FULL, _WINDOW)[has] for has in pattern])


def layers_with_windows(entries: Entries) -> list[int]:
    """Return 1 for each layer with a window, 0 for the others; by default every second."""
    layers = entries.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = entries.strings("layer_types") or [(_WINDOW, _FULL)[i % 2] for i in range(layers)]
    message = f"layer_types must be {_WINDOW!r} or {_FULL!r} for each of {layers} layers"
    require(len(kinds) == layers and {*kinds} <= {_WINDOW, _FULL}, f"{CONFIG}: {message}")
    return [int(kind == _WINDOW) for kind in kinds]


def check_window(model: Model, family: str) -> None:
    """Raise UserError for a window that reaches ahead."""
    _, after = size = model["window_size"]
    require(after == 0, f"the model has window_size {size}; a {family} has 0 tokens ahead")


def _yarn(entries: Entries) -> dict[str, Any]:
    yarn = llama.scaled_rope(entries, "yarn", {})
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


def _more_entries(model: Model) -> dict[str, Any]:
    """Return entries that are made of several arguments, or that need a check."""
    check_window(model, FAMILY.name)
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


FAMILY = Family(
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    arguments={
        **llama.FAMILY.arguments,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "position_embedding_type": "yarn",
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
    },
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
    },
    entries={
        **llama.FAMILY.entries,
        "num_experts": _COUNT,
        "moe_router_topk": experts_of_a_token(_COUNT),
        "moe_ffn_hidden_size": integer("intermediate_size"),
        "activation_func_clamp_value": positive_number("swiglu_limit", 7.0),
        "window_size": window(128),
        "window_attn_skip_freq": windows(layers_with_windows),
    },
    tensors=lambda model: _TENSORS,
    more_arguments=_yarn,
    more_entries=_more_entries,
)
