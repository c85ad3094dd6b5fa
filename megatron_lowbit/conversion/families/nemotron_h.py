"""Nemotron-H: Hugging Face's NemotronHForCausalLM and Megatron-LM's hybrids.

A Mamba-2 block's projection and convolution are one tensor there; Megatron-LM's checkpoints have
one for each of their outputs: gate z, input x, B, C and steps dt.
"""

import reprlib

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.family import Entry, Family, integer, query_groups
from megatron_lowbit.conversion.mapping import mamba_heads
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

_SYMBOLS = {"linear_attention": "M", "full_attention": "*", "mlp": "-",
            "mamba": "M", "attention": "*"}  # fmt: skip
"""Symbols of types of blocks. The last two names are from older files."""
_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
_EPSILON = 1e-5
"""Epsilon of all norms: megatron-core fixes it for a Mamba block."""

_BLOCKS = {
    "M": {
        "mixer.in_proj.layer_norm_weight": "norm.weight",
        **{f"mixer.in_proj.weight.{x}": "mixer.in_proj.weight" for x in ("z", *"xBC", "dt")},
        **{f"mixer.conv1d.weight.{x}": "mixer.conv1d.weight" for x in "xBC"},
        **{f"mixer.conv1d.bias.{x}": "mixer.conv1d.bias" for x in "xBC"},
        "mixer.norm.weight": "mixer.norm.weight",
        "mixer.out_proj.weight": "mixer.out_proj.weight",
        "mixer.A_log": "mixer.A_log",
        "mixer.D": "mixer.D",
        "mixer.dt_bias": "mixer.dt_bias",
    },
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
        "hidden_size": integer("hidden_size"),
        "ffn_hidden_size": integer("intermediate_size"),
        "num_attention_heads": integer("num_attention_heads"),
        "num_query_groups": Entry("num_key_value_heads", query_groups),
        "kv_channels": integer("head_dim"),
        "max_position_embeddings": integer("max_position_embeddings"),
        "mamba_state_dim": integer("ssm_state_size"),
        "mamba_head_dim": integer("mamba_head_dim"),
        "mamba_num_groups": integer("n_groups"),
        "mamba_num_heads": integer("mamba_num_heads"),
        "vocab_size": integer("vocab_size"),
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
