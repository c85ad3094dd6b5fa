"""GPT-2: Hugging Face's GPT2LMHeadModel and Megatron-LM's GPT with learned positions."""

import reprlib
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
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

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_GELU = "gelu"
_TENSORS = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
    "decoder.layers.*.self_attention.linear_qkv.weight": "transformer.h.*.attn.c_attn.weight",
    "decoder.layers.*.self_attention.linear_qkv.bias": "transformer.h.*.attn.c_attn.bias",
    "decoder.layers.*.self_attention.linear_proj.weight": "transformer.h.*.attn.c_proj.weight",
    "decoder.layers.*.self_attention.linear_proj.bias": "transformer.h.*.attn.c_proj.bias",
    "decoder.layers.*.mlp.linear_fc1.weight": "transformer.h.*.mlp.c_fc.weight",
    "decoder.layers.*.mlp.linear_fc1.bias": "transformer.h.*.mlp.c_fc.bias",
    "decoder.layers.*.mlp.linear_fc2.weight": "transformer.h.*.mlp.c_proj.weight",
    "decoder.layers.*.mlp.linear_fc2.bias": "transformer.h.*.mlp.c_proj.bias",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "transformer.h.*.ln_1.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_bias": "transformer.h.*.ln_1.bias",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "transformer.h.*.ln_2.weight",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_bias": "transformer.h.*.ln_2.bias",
}


def _is_tanh_gelu(entries: Entries) -> bool:
    name = entries.string("activation_function", _TANH_GELU[0])
    if name not in (*_TANH_GELU, _GELU):
        raise UserError(
            f"{CONFIG}: activation_function {reprlib.repr(name)}: Megatron-LM's GPT has "
            f"{', '.join(map(repr, (*_TANH_GELU, _GELU)))}"
        )
    return name in _TANH_GELU


def _heads(entries: Entries) -> dict[str, Any]:
    hidden, heads = entries.integer("n_embd"), entries.integer("n_head")
    require(hidden % heads == 0, f"{CONFIG}: n_head {heads}: must divide n_embd {hidden}")
    return {"num_query_groups": heads, "kv_channels": hidden // heads}


def _check_heads(model: Model) -> dict[str, Any]:
    heads = model["num_attention_heads"]
    wanted = {"num_query_groups": heads, "kv_channels": model["hidden_size"] // heads}
    check_arguments(model, FAMILY.name, wanted)
    return {}


FAMILY = Family(
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
    tensors=lambda model: _TENSORS,
    is_transposed=True,
    more_arguments=_heads,
    more_entries=_check_heads,
)
