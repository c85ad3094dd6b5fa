"""Megatron-LM's hybrids: Nemotron-H, Bamba, and Mamba-2 without other blocks.

A Mamba-2 block's projection and convolution are one tensor there; Megatron-LM's checkpoints have
one for each of their outputs: gate z, input x, B, C and steps dt.
"""

import math
import reprlib
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.families.dense import LLAMA
from megatron_lowbit.conversion.families.rope import rope_arguments, rope_entries
from megatron_lowbit.conversion.family import Entry, Family, integer, number_of_layers, untied
from megatron_lowbit.conversion.mapping import Model, mamba_heads
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

_SYMBOLS = {"linear_attention": "M", "full_attention": "*", "mlp": "-",
            "mamba": "M", "attention": "*"}  # fmt: skip
"""Symbols of types of blocks. The last two names are from older files."""
_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
_OF_A_LLAMA = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip
_EPSILON = 1e-5
"""Epsilon of all norms: megatron-core fixes it for a Mamba block."""


def _mamba(norm: str, mixer: str) -> dict[str, str]:
    """Return the tensors of a Mamba-2 block, by the names of its norm and its mixer."""
    return {
        "mixer.in_proj.layer_norm_weight": f"{norm}.weight",
        **{f"mixer.in_proj.weight.{x}": f"{mixer}.in_proj.weight" for x in ("z", *"xBC", "dt")},
        **{f"mixer.conv1d.weight.{x}": f"{mixer}.conv1d.weight" for x in "xBC"},
        **{f"mixer.conv1d.bias.{x}": f"{mixer}.conv1d.bias" for x in "xBC"},
        "mixer.norm.weight": f"{mixer}.norm.weight",
        "mixer.out_proj.weight": f"{mixer}.out_proj.weight",
        "mixer.A_log": f"{mixer}.A_log",
        "mixer.D": f"{mixer}.D",
        "mixer.dt_bias": f"{mixer}.dt_bias",
    }


_BLOCKS = {
    "M": _mamba("norm", "mixer"),
    "*": {
        "self_attention.linear_qkv.layer_norm_weight": "norm.weight",
        "self_attention.linear_qkv.weight": "mixer.{q,k,v}_proj.weight",
        "self_attention.linear_proj.weight": "mixer.o_proj.weight",
    },
    "-": {
        "mlp.linear_fc1.layer_norm_weight": "norm.weight",
        "mlp.linear_fc1.weight": "mixer.up_proj.weight",
        "mlp.linear_fc2.weight": "mixer.down_proj.weight",
    },
}


def _pattern(entries: Entries) -> str:
    """Return a symbol for each block, from symbols or names."""
    blocks = entries.strings("layers_block_type") or entries.string("hybrid_override_pattern")
    require(len(blocks) <= MOST_LAYERS, f"{CONFIG}: has more than {MOST_LAYERS} blocks")
    symbols = [block if block in _TYPES else _SYMBOLS.get(block, "") for block in blocks]
    if "" in symbols:
        raise UserError(
            f"{CONFIG}: a block is {reprlib.repr(blocks[symbols.index('')])}: only "
            f"{', '.join(_TYPES.values())} are converted"
        )
    return "".join(symbols)


NEMOTRON_H = Family(
    name="Nemotron-H",
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    arguments={
        "swiglu": False,
        "squared_relu": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": _EPSILON,
        "add_bias_linear": False,
        "position_embedding_type": "none",
        "untie_embeddings_and_output_weights": True,
    },
    defaults={"num_key_value_heads": 8},
    fixed={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "conv_kernel": 4,
        "use_conv_bias": True,
        "layer_norm_epsilon": _EPSILON,
        "use_bias": False,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "num_nextn_predict_layers": 0,
    },
    entries={
        "hybrid_layer_pattern": Entry(
            "layers_block_type", _pattern, lambda pattern: [_TYPES[symbol] for symbol in pattern]
        ),
        **{name: LLAMA.entries[name] for name in _OF_A_LLAMA},
        "kv_channels": integer("head_dim"),
        "mamba_state_dim": integer("ssm_state_size"),
        "mamba_head_dim": integer("mamba_head_dim"),
        "mamba_num_groups": integer("n_groups"),
        "mamba_num_heads": integer("mamba_num_heads"),
    },
    outer={
        "embedding.word_embeddings.weight": "backbone.embeddings.weight",
        "decoder.final_norm.weight": "backbone.norm_f.weight",
        "output_layer.weight": "lm_head.weight",
    },
    layers=lambda model: [_BLOCKS[symbol] for symbol in model["hybrid_layer_pattern"]],
    prefix="backbone.layers",
    more_arguments=lambda entries: {"num_layers": len(_pattern(entries))},
    more_entries=lambda model: {
        "mamba_num_heads": mamba_heads(model),
        # transformers raises steps to it; megatron-core leaves them, and 0 has no log.
        "time_step_min": 1e-30,
    },
)


def _expansion(model: Model) -> int:
    """Return the width of a Mamba-2 block in hidden sizes."""
    inner, hidden = mamba_heads(model) * model["mamba_head_dim"], model["hidden_size"]
    message = f"the model's Mamba blocks have {inner} channels; transformers has a multiple of "
    require(inner % hidden == 0, f"{message}hidden_size {hidden}")
    return int(inner // hidden)


def _mamba_layers(pattern: str) -> int:
    require(
        {*pattern} == {"M"},
        f"the model has hybrid_layer_pattern {pattern:.200}; a Mamba-2 has only M",
    )
    return len(pattern)


MAMBA2 = NEMOTRON_H.variant(
    ("Mamba-2", "Mamba2ForCausalLM", "mamba2"),
    without=NEMOTRON_H.entries,
    arguments={
        # Needed by Megatron-LM, but of no effect without other blocks.
        "ffn_hidden_size": lambda model: 4 * model["hidden_size"],
        "num_attention_heads": mamba_heads,
        "num_query_groups": mamba_heads,
        "kv_channels": lambda model: model["mamba_head_dim"],
        "max_position_embeddings": 2**20,
    },
    fixed={
        "hidden_act": "silu",
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "layer_norm_epsilon": _EPSILON,
        "time_step_limit": [0.0, math.inf],
    },
    defaults={"n_groups": 8},
    entries={
        "hybrid_layer_pattern": Entry(
            "num_hidden_layers", lambda entries: "M" * number_of_layers(entries), _mamba_layers
        ),
        "hidden_size": integer("hidden_size"),
        "mamba_state_dim": integer("state_size"),
        "mamba_head_dim": integer("head_dim"),
        "mamba_num_groups": integer("n_groups"),
        "mamba_num_heads": integer("num_heads"),
        "untie_embeddings_and_output_weights": untied(False),
        "vocab_size": integer("vocab_size"),
    },
    more_arguments=lambda entries: {"num_layers": number_of_layers(entries)},
    more_entries=lambda model: {"expand": _expansion(model), "num_heads": mamba_heads(model)},
)


def _mixers(entries: Entries) -> str:
    """Return the symbols of Bamba's blocks: attention or Mamba-2, each with an MLP behind it."""
    attention = entries.integers("attn_layer_indices")
    return "".join(
        "*-" if layer in attention else "M-" for layer in range(number_of_layers(entries))
    )


def _attention_layers(pattern: str) -> list[int]:
    mixers = pattern[::2]
    require(
        pattern[1::2] == "-" * len(mixers) and {*mixers} <= {*"M*"},
        f"the model has hybrid_layer_pattern {pattern:.200}; a Bamba has pairs of M or * and -",
    )
    return [layer for layer, symbol in enumerate(mixers) if symbol == "*"]


def _bamba_head(entries: Entries) -> int:
    """Return the channels of a head of Mamba-2; files may have ``auto``."""
    heads, expand = entries.integer("mamba_n_heads"), entries.integer("mamba_expand", 2)
    return expand * entries.integer("hidden_size") // heads


def _bamba_arguments(entries: Entries) -> dict[str, Any]:
    key, part = "partial_rotary_factor", 0.5
    actual = rope_entries(entries).number(key, part)
    require(actual == part, f"{CONFIG}: {key} {actual}: only {part} is converted")
    return {"num_layers": 2 * number_of_layers(entries), **rope_arguments(entries, "default")}


_BAMBA_BLOCKS = {
    "M": _mamba("input_layernorm", "mamba"),
    "*": {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_qkv.weight": "self_attn.{q,k,v}_proj.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    },
    "-": {
        "mlp.linear_fc1.layer_norm_weight": "pre_ff_layernorm.weight",
        "mlp.linear_fc1.weight": "feed_forward.{gate,up}_proj.weight",
        "mlp.linear_fc2.weight": "feed_forward.down_proj.weight",
    },
}
BAMBA = NEMOTRON_H.variant(
    ("Bamba", "BambaForCausalLM", "bamba"),
    arguments={
        "swiglu": True,
        "squared_relu": False,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "use_rope_scaling": None,
    },
    fixed={
        "hidden_act": "silu",
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "rms_norm_eps": _EPSILON,
        "attention_bias": False,
        "mlp_bias": False,
        "time_step_limit": [0.0, math.inf],
    },
    defaults={"num_key_value_heads": 8},
    entries={
        "kv_channels": LLAMA.entries["kv_channels"],
        "rotary_base": LLAMA.entries["rotary_base"],
        "untie_embeddings_and_output_weights": untied(False),
        "hybrid_layer_pattern": Entry("attn_layer_indices", _mixers, _attention_layers),
        "mamba_state_dim": integer("mamba_d_state"),
        "mamba_head_dim": Entry("mamba_d_head", _bamba_head),
        "mamba_num_groups": integer("mamba_n_groups", 1),
        "mamba_num_heads": integer("mamba_n_heads"),
    },
    outer={
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_norm.weight": "model.final_layernorm.weight",
        "output_layer.weight": "lm_head.weight",
    },
    layers=lambda model: [_BAMBA_BLOCKS[symbol] for symbol in model["hybrid_layer_pattern"]],
    prefix="model.layers",
    blocks=2,
    more_arguments=_bamba_arguments,
    more_entries=lambda model: {
        "num_hidden_layers": model["num_layers"] // 2,
        "mamba_expand": _expansion(model),
        "mamba_n_heads": mamba_heads(model),
        "rope_scaling": None,
    },
)
