"""Llama 2 and 3: Hugging Face's LlamaForCausalLM and this project's GPT.

Other families have the same attention, norms and embeddings, and MLPs of their own.
"""

import reprlib
from collections.abc import Callable
from typing import Any

from megatron_lowbit.conversion.plan import MOST_LAYERS, Family, Place, Rule, check_model
from megatron_lowbit.conversion.tensor_transforms import Cut, Join, QueryKeyValue
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

ARCHITECTURE = "LlamaForCausalLM"
_SWIGLU = "silu"
_LLAMA3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Values of Llama 3.1's scaling of frequencies that megatron-core fixes."""


def from_config(config: dict[str, Any]) -> Family:
    """Return the family member that a config.json describes.

    Raises UserError for what this project's model cannot do.
    """
    model = model_of(config)
    return Family("Llama", model, config, rules(model))


def claims(model: dict[str, Any]) -> bool:
    """Return True: this family is asked last, and :func:`to_config` refuses what is no Llama."""
    return True


def model_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a config.json gives the model, with the MLPs of a Llama."""
    entries = Entries(config, "config.json")
    heads, hidden = entries.integer("num_attention_heads"), entries.integer("hidden_size")
    _require(config.get("hidden_act", _SWIGLU) == _SWIGLU, config, "hidden_act", _SWIGLU)
    # The second is the older name, beside which the frequencies' base is an entry of its own.
    rope = entries.inner("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    base = rope.number("rope_theta", entries.number("rope_theta", 10000), above=1)
    require(base.is_integer(), f"config.json: rope_theta {base}: Megatron-LM's is an integer")
    for key in ("attention_bias", "mlp_bias"):
        _require(not config.get(key), config, key, False)
    model = {
        "num_layers": entries.integer("num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": entries.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": query_groups(entries),
        "kv_channels": entries.integer("head_dim", hidden // heads),
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": entries.number("rms_norm_eps", 1e-6, above=0),
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": int(base),
        "rotary_percent": 1.0,
        "max_position_embeddings": entries.integer("max_position_embeddings"),
        "untie_embeddings_and_output_weights": not entries.boolean("tie_word_embeddings", False),
        "vocab_size": entries.integer("vocab_size"),
    }
    return model | _scaling(rope)


def query_groups(entries: Entries) -> int:
    """Return the number of heads of key and value."""
    heads = entries.integer("num_attention_heads")
    groups = entries.integer("num_key_value_heads", heads)
    require(
        heads % groups == 0,
        f"config.json: num_key_value_heads {groups}: must divide num_attention_heads {heads}",
    )
    return groups


def _scaling(rope: Entries) -> dict[str, Any]:
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind == "default":
        return {}
    if kind != "llama3":
        raise UserError(f"config.json: rope_type {kind!r}: this project's GPT has llama3's alone")
    for key, good in _LLAMA3.items():
        if rope.number(key) != good:
            raise UserError(f"config.json: {key} {rope.number(key)}: megatron-core's is {good!r}")
    return {"use_rope_scaling": True, "rope_scaling_factor": rope.number("factor", above=0)}


def _require(condition: bool, config: dict[str, Any], key: str, good: object) -> None:
    if not condition:
        value = reprlib.repr(config[key])
        raise UserError(f"config.json: {key} {value}: this project's GPT has {good!r}")


def to_config(model: dict[str, Any]) -> dict[str, Any]:
    """Build a config.json for a trained model of this kind.

    Raises UserError where the model is no Llama.
    """
    wanted = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False,
              "position_embedding_type": "rope", "rotary_percent": 1.0}  # fmt: skip
    check_model(model, "a Llama", wanted)
    scaling = None
    if model.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": model["rope_scaling_factor"], **_LLAMA3}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": _SWIGLU,
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_query_groups"],
        "head_dim": model["kv_channels"],
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": model["layernorm_epsilon"],
        "rope_theta": float(model["rotary_base"]),
        "rope_scaling": scaling,
        "tie_word_embeddings": not model["untie_embeddings_and_output_weights"],
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": model["vocab_size"],
    }


MLP = Callable[[int], dict[Place, tuple[tuple[str, ...], Join]]]
"""Function from a layer's number to the tensors of its MLP."""


def rules(model: dict[str, Any], mlp: MLP | None = None) -> list[Rule]:
    """Return the rules of all the model's tensors."""
    hidden, vocabulary, layers = (model[key] for key in ("hidden_size", "vocab_size", "num_layers"))
    groups, dimension = model["num_query_groups"], model["kv_channels"]
    query, key = model["num_attention_heads"] * dimension, groups * dimension
    found = [Rule(Place("embedding.word_embeddings.weight"), ("model.embed_tokens.weight",),
                  Cut((vocabulary,)))]  # fmt: skip
    for layer in range(layers):
        theirs = f"model.layers.{layer}"
        parts = {
            in_layer("self_attention.linear_qkv.layer_norm_weight", model, layer): (
                (f"{theirs}.input_layernorm.weight",), Join((hidden,)),
            ),
            in_layer("self_attention.linear_qkv.weight", model, layer): (
                tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv"),
                QueryKeyValue((query, key, key), groups),
            ),
            in_layer("self_attention.linear_proj.weight", model, layer): (
                (f"{theirs}.self_attn.o_proj.weight",), Join((hidden,)),
            ),
            in_layer("mlp.linear_fc1.layer_norm_weight", model, layer): (
                (f"{theirs}.post_attention_layernorm.weight",), Join((hidden,)),
            ),
            **(_gated_mlp(model, layer) if mlp is None else mlp(layer)),
        }  # fmt: skip
        found += [Rule(place, *names_and_join) for place, names_and_join in parts.items()]
    found.append(Rule(Place("decoder.final_layernorm.weight"), ("model.norm.weight",),
                      Join((hidden,))))  # fmt: skip
    if model["untie_embeddings_and_output_weights"]:
        found.append(Rule(Place("output_layer.weight"), ("lm_head.weight",), Cut((vocabulary,))))
    return found


def in_layer(name: str, model: dict[str, Any], layer: int) -> Place:
    """Return the place of a layer in a tensor that all layers share."""
    return Place(f"decoder.layers.{name}", (layer,), (model["num_layers"],))


def _gated_mlp(model: dict[str, Any], layer: int) -> dict[Place, tuple[tuple[str, ...], Join]]:
    mlp, wide = f"model.layers.{layer}.mlp", model["ffn_hidden_size"]
    gate_and_up = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    return {
        in_layer("mlp.linear_fc1.weight", model, layer): (gate_and_up, Join((wide, wide))),
        in_layer("mlp.linear_fc2.weight", model, layer): (
            (f"{mlp}.down_proj.weight",), Join((model["hidden_size"],)),
        ),
    }  # fmt: skip
