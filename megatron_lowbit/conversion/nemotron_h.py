"""Nemotron-H: Hugging Face's NemotronHForCausalLM and this project's hybrids.

A Mamba-2 block's projection and convolution are one tensor there, and here one for each thing that
they compute: gate z, input x, B, C and steps dt.
"""

import reprlib
from itertools import accumulate, pairwise
from typing import Any

from megatron_lowbit.conversion.llama import query_groups
from megatron_lowbit.conversion.plan import MOST_LAYERS, Family, Place, Rule, check_model
from megatron_lowbit.conversion.tensor_transforms import Cut, Join, QueryKeyValue, Share
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

ARCHITECTURE = "NemotronHForCausalLM"
_SYMBOLS = {"linear_attention": "M", "full_attention": "*", "mlp": "-",
            "mamba": "M", "attention": "*"}  # fmt: skip
"""Symbols of kinds of blocks. The last two names are those of older files."""
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
_ONLY = {
    "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": 4, "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5, "use_bias": False, "mamba_proj_bias": False,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "sliding_window": None, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Entries with the only value that is converted. megatron-core fixes a mixer's epsilon."""
_SMALLEST_STEP = 1e-30
"""transformers raises steps to ``time_step_min``; megatron-core leaves them, and 0 has no log."""


def from_config(config: dict[str, Any]) -> Family:
    """Return the family member that a config.json describes.

    Raises UserError for what this project's model cannot do.
    """
    for key, good in _ONLY.items():
        if config.get(key, good) != good:
            raise UserError(
                f"config.json: {key} {reprlib.repr(config[key])}: this project's hybrids have "
                f"{good!r}"
            )
    pattern, entries = _pattern(config), Entries(config, "config.json")
    heads = entries.integer("num_attention_heads")
    model = {
        "num_layers": len(pattern),
        "hidden_size": entries.integer("hidden_size"),
        "ffn_hidden_size": entries.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": query_groups(entries),
        "kv_channels": entries.integer("head_dim"),
        "swiglu": False,
        "squared_relu": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": _ONLY["layer_norm_epsilon"],
        "add_bias_linear": False,
        "position_embedding_type": "none",
        "max_position_embeddings": entries.integer("max_position_embeddings"),
        "untie_embeddings_and_output_weights": True,
        "hybrid_layer_pattern": pattern,
        "mamba_state_dim": entries.integer("ssm_state_size"),
        "mamba_head_dim": entries.integer("mamba_head_dim"),
        "mamba_num_groups": entries.integer("n_groups"),
        "mamba_num_heads": entries.integer("mamba_num_heads"),
        "vocab_size": entries.integer("vocab_size"),
    }
    return Family("Nemotron-H", model, config, rules(model))


def _pattern(config: dict[str, Any]) -> str:
    """Return a symbol for each block, from symbols or names."""
    entries = Entries(config, "config.json")
    kinds = entries.strings("layers_block_type") or entries.string("hybrid_override_pattern")
    require(len(kinds) <= MOST_LAYERS, f"config.json: has more than {MOST_LAYERS} blocks")
    symbols = [kind if kind in _KINDS else _SYMBOLS.get(kind) for kind in kinds]
    if None in symbols:
        raise UserError(
            f"config.json: a block is {reprlib.repr(kinds[symbols.index(None)])}: this project's "
            f"hybrids have {', '.join(_KINDS.values())}"
        )
    return "".join(symbols)


def claims(model: dict[str, Any]) -> bool:
    """Return whether a model can only be of this family."""
    return "hybrid_layer_pattern" in model


def to_config(model: dict[str, Any]) -> dict[str, Any]:
    """Build a config.json for a trained model of this kind.

    Raises UserError where the model is no Nemotron-H.
    """
    wanted = {"swiglu": False, "squared_relu": True, "normalization": "RMSNorm",
              "add_bias_linear": False, "position_embedding_type": "none",
              "untie_embeddings_and_output_weights": True}  # fmt: skip
    check_model(model, "a Nemotron-H", wanted)
    if model["layernorm_epsilon"] != _ONLY["layer_norm_epsilon"]:
        raise UserError(
            f"the model has layernorm_epsilon {model['layernorm_epsilon']:g}; a Nemotron-H has one "
            f"for all norms, and megatron-core's Mamba blocks compute with "
            f"{_ONLY['layer_norm_epsilon']:g}"
        )
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "nemotron_h",
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "layers_block_type": [_KINDS[symbol] for symbol in model["hybrid_layer_pattern"]],
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_query_groups"],
        "head_dim": model["kv_channels"],
        "max_position_embeddings": model["max_position_embeddings"],
        "ssm_state_size": model["mamba_state_dim"],
        "mamba_head_dim": model["mamba_head_dim"],
        "mamba_num_heads": _mamba_heads(model),
        "n_groups": model["mamba_num_groups"],
        "time_step_min": _SMALLEST_STEP,
        "vocab_size": model["vocab_size"],
        **_ONLY,
    }


def _mamba_heads(model: dict[str, Any]) -> int:
    """Return the number of heads, counted as megatron-core does where no argument says it."""
    return model["mamba_num_heads"] or 2 * model["hidden_size"] // model["mamba_head_dim"]


def rules(model: dict[str, Any]) -> list[Rule]:
    """Return the rules of all the model's tensors."""
    vocabulary, hidden = Cut((model["vocab_size"],)), Join((model["hidden_size"],))
    tables = {
        "embedding.word_embeddings.weight": ("backbone.embeddings.weight", vocabulary),
        "decoder.final_norm.weight": ("backbone.norm_f.weight", hidden),
        "output_layer.weight": ("lm_head.weight", vocabulary),
    }
    found = [Rule(Place(ours), (theirs,), join) for ours, (theirs, join) in tables.items()]
    blocks = {"M": _mamba, "*": _attention, "-": _mlp}
    for layer, symbol in enumerate(model["hybrid_layer_pattern"]):
        norm, tensors = blocks[symbol](model)
        ours, theirs = f"decoder.layers.{layer}", f"backbone.layers.{layer}"
        found.append(Rule(Place(f"{ours}.{norm}"), (f"{theirs}.norm.weight",), hidden))
        found += [
            Rule(Place(f"{ours}.{name}"), tuple(f"{theirs}.mixer.{part}" for part in parts), join)
            for name, (parts, join) in tensors.items()
        ]
    return found


Block = tuple[str, dict[str, tuple[tuple[str, ...], Join]]]
"""Megatron-LM's name of a block's norm; its other tensors, and what makes them."""


def _mamba(model: dict[str, Any]) -> Block:
    heads = _mamba_heads(model)
    inner = heads * model["mamba_head_dim"]
    states = model["mamba_num_groups"] * model["mamba_state_dim"]
    tensors: dict[str, tuple[tuple[str, ...], Join]] = {
        **_shares("in_proj.weight", z=inner, x=inner, B=states, C=states, dt=heads),
        **_shares("conv1d.weight", x=inner, B=states, C=states),
        **_shares("conv1d.bias", x=inner, B=states, C=states),
        "mixer.norm.weight": (("norm.weight",), Join((inner,))),
        "mixer.out_proj.weight": (("out_proj.weight",), Join((model["hidden_size"],))),
    }
    for name in ("A_log", "D", "dt_bias"):
        tensors[f"mixer.{name}"] = (name,), Join((heads,))
    return "mixer.in_proj.layer_norm_weight", tensors


def _shares(name: str, **rows: int) -> dict[str, tuple[tuple[str, ...], Join]]:
    """Split a mixer's tensor into the rows of each thing, which are concatenated in it."""
    ends = list(accumulate(rows.values(), initial=0))
    return {
        f"mixer.{name}.{thing}": ((name,), Share((ends[-1],), start, stop))
        for thing, (start, stop) in zip(rows, pairwise(ends), strict=True)
    }


def _attention(model: dict[str, Any]) -> Block:
    groups, dimension = model["num_query_groups"], model["kv_channels"]
    query, key = model["num_attention_heads"] * dimension, groups * dimension
    return "self_attention.linear_qkv.layer_norm_weight", {
        "self_attention.linear_qkv.weight": (
            tuple(f"{name}_proj.weight" for name in "qkv"),
            QueryKeyValue((query, key, key), groups),
        ),
        "self_attention.linear_proj.weight": (("o_proj.weight",), Join((model["hidden_size"],))),
    }


def _mlp(model: dict[str, Any]) -> Block:
    return "mlp.linear_fc1.layer_norm_weight", {
        "mlp.linear_fc1.weight": (("up_proj.weight",), Join((model["ffn_hidden_size"],))),
        "mlp.linear_fc2.weight": (("down_proj.weight",), Join((model["hidden_size"],))),
    }
