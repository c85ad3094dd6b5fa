"""GPT-2: Hugging Face's GPT2LMHeadModel and this project's GPT with learned positions."""

import reprlib
from typing import Any

from megatron_lowbit.conversion.llama import in_layer
from megatron_lowbit.conversion.plan import MOST_LAYERS, Family, Place, Rule, check_model
from megatron_lowbit.conversion.tensor_transforms import (
    Cut,
    Join,
    QueryKeyValue,
    Stacked,
    Transposed,
)
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

ARCHITECTURE = "GPT2LMHeadModel"
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_GELU = "gelu"
_ONLY = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}  # fmt: skip


def from_config(config: dict[str, Any]) -> Family:
    """Return the family member that a config.json describes.

    Raises UserError for what this project's model cannot do.
    """
    activation = config.get("activation_function", _TANH_GELU[0])
    if activation not in (*_TANH_GELU, _GELU):
        raise UserError(
            f"config.json: activation_function {reprlib.repr(activation)}: Megatron-LM's GPT has "
            f"{', '.join(map(repr, (*_TANH_GELU, _GELU)))}"
        )
    for key, good in _ONLY.items():
        if config.get(key, good) != good:
            value = reprlib.repr(config[key])
            raise UserError(f"config.json: {key} {value}: this project's GPT has {good!r}")
    entries = Entries(config, "config.json")
    hidden, heads = entries.integer("n_embd"), entries.integer("n_head")
    require(hidden % heads == 0, f"config.json: n_head {heads}: must divide n_embd {hidden}")
    model = {
        "num_layers": entries.integer("n_layer", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": entries.integer("n_inner", 4 * hidden),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "swiglu": False,
        "squared_relu": False,
        "openai_gelu": activation in _TANH_GELU,
        "normalization": "LayerNorm",
        "layernorm_epsilon": entries.number("layer_norm_epsilon", 1e-5, above=0),
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": entries.integer("n_positions"),
        "untie_embeddings_and_output_weights": not entries.boolean("tie_word_embeddings", True),
        "vocab_size": entries.integer("vocab_size"),
    }
    return Family("GPT-2", model, config, rules(model))


def claims(model: dict[str, Any]) -> bool:
    """Return whether a model can only be of this family."""
    return model["position_embedding_type"] == "learned_absolute"


def to_config(model: dict[str, Any]) -> dict[str, Any]:
    """Build a config.json for a trained model of this kind.

    Raises UserError where the model is no GPT-2.
    """
    heads = model["num_attention_heads"]
    wanted = {"swiglu": False, "squared_relu": False, "normalization": "LayerNorm",
              "add_bias_linear": True, "num_query_groups": heads,
              "kv_channels": model["hidden_size"] // heads}  # fmt: skip
    check_model(model, "a GPT-2", wanted)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "gpt2",
        "activation_function": _TANH_GELU[0] if model["openai_gelu"] else _GELU,
        "n_layer": model["num_layers"],
        "n_embd": model["hidden_size"],
        "n_inner": model["ffn_hidden_size"],
        "n_head": heads,
        "n_positions": model["max_position_embeddings"],
        "layer_norm_epsilon": model["layernorm_epsilon"],
        "tie_word_embeddings": not model["untie_embeddings_and_output_weights"],
        "vocab_size": model["vocab_size"],
        **_ONLY,
    }


def rules(model: dict[str, Any]) -> list[Rule]:
    """Return the rules of all the model's tensors."""
    hidden, vocabulary = model["hidden_size"], Cut((model["vocab_size"],))
    tables = {
        "embedding.word_embeddings.weight": ("transformer.wte.weight", vocabulary),
        "embedding.position_embeddings.weight": (
            "transformer.wpe.weight", Join((model["max_position_embeddings"],)),
        ),
        "decoder.final_layernorm.weight": ("transformer.ln_f.weight", Join((hidden,))),
        "decoder.final_layernorm.bias": ("transformer.ln_f.bias", Join((hidden,))),
    }  # fmt: skip
    if model["untie_embeddings_and_output_weights"]:
        tables["output_layer.weight"] = "lm_head.weight", vocabulary
    found = [Rule(Place(ours), (theirs,), join) for ours, (theirs, join) in tables.items()]
    for layer in range(model["num_layers"]):
        found += _layer_rules(model, layer)
    return found


def _layer_rules(model: dict[str, Any], layer: int) -> list[Rule]:
    hidden, wide = model["hidden_size"], model["ffn_hidden_size"]
    query_key_value = Stacked(
        (3 * hidden,), QueryKeyValue((hidden,) * 3, model["num_query_groups"])
    )
    linears = {
        "self_attention.linear_qkv": ("attn.c_attn", hidden, query_key_value),
        "self_attention.linear_proj": ("attn.c_proj", hidden, Join((hidden,))),
        "mlp.linear_fc1": ("mlp.c_fc", hidden, Join((wide,))),
        "mlp.linear_fc2": ("mlp.c_proj", wide, Join((hidden,))),
    }
    norms = {"self_attention.linear_qkv": "ln_1", "mlp.linear_fc1": "ln_2"}
    found = {}
    for ours, (theirs, width, join) in linears.items():
        found[f"{ours}.weight"] = f"{theirs}.weight", Transposed((width,), join)
        found[f"{ours}.bias"] = f"{theirs}.bias", join
    for ours, theirs in norms.items():
        for part in ("weight", "bias"):
            found[f"{ours}.layer_norm_{part}"] = f"{theirs}.{part}", Join((hidden,))
    return [
        Rule(in_layer(ours, model, layer), (f"transformer.h.{layer}.{theirs}",), join)
        for ours, (theirs, join) in found.items()
    ]
