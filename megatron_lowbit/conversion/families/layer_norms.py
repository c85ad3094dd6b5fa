"""Families with LayerNorm: GPT-2, GPT-BigCode, StarCoder2, StableLM, Nemotron and Jais 2."""

import reprlib

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.families.dense import (
    ALL_WINDOWS,
    ATTENTION,
    ATTENTION_BIASES,
    LLAMA,
    MLP,
    OUTER,
    QKV_BIAS,
    UNGATED_MLP,
)
from megatron_lowbit.conversion.families.rope import rotated_part
from megatron_lowbit.conversion.family import (
    Entry,
    Family,
    boolean,
    integer,
    positive_number,
    untied,
    window,
)
from megatron_lowbit.conversion.mapping import Model, biases
from megatron_lowbit.errors import require
from megatron_lowbit.json_files import Entries

_OUTER = {**OUTER, "decoder.final_layernorm.bias": "model.norm.bias"}
_ATTENTION = {
    **ATTENTION,
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_bias": "post_attention_layernorm.bias",
}
_C_MLP = {"mlp.linear_fc1.weight": "mlp.c_fc.weight", "mlp.linear_fc2.weight": "mlp.c_proj.weight"}
_GPT2_LAYER = {
    "self_attention.linear_qkv.weight": "attn.c_attn.weight",
    "self_attention.linear_proj.weight": "attn.c_proj.weight",
    **_C_MLP,
    "self_attention.linear_qkv.layer_norm_weight": "ln_1.weight",
    "mlp.linear_fc1.layer_norm_weight": "ln_2.weight",
}
_TANH_GELU, _GELU = ("gelu_new", "gelu_pytorch_tanh"), "gelu"


def _head_dimension(model: Model) -> int:
    return int(model["hidden_size"] // model["num_attention_heads"])


def _is_tanh_gelu(entries: Entries) -> bool:
    name, known = entries.string("activation_function", _TANH_GELU[0]), (*_TANH_GELU, _GELU)
    entry = f"{CONFIG}: activation_function {reprlib.repr(name)}"
    require(name in known, f"{entry}: Megatron-LM's GPT has {', '.join(map(repr, known))}")
    return name in _TANH_GELU


def _gpt2_heads(entries: Entries) -> int:
    hidden, heads = entries.integer("n_embd"), entries.integer("n_head")
    require(hidden % heads == 0, f"{CONFIG}: n_head {heads}: must divide n_embd {hidden}")
    return heads


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
        "num_query_groups": lambda model: model["num_attention_heads"],
        "kv_channels": _head_dimension,
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
        "num_layers": integer("n_layer", maximum=MOST_LAYERS),
        "ffn_hidden_size": Entry(
            "n_inner", lambda entries: entries.integer("n_inner", 4 * entries.integer("n_embd"))
        ),
        "num_attention_heads": Entry("n_head", _gpt2_heads),
        "layernorm_epsilon": positive_number("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": integer("n_positions"),
        "untie_embeddings_and_output_weights": untied(True),
        "vocab_size": integer("vocab_size"),
    },
    outer={
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.final_layernorm.weight": "transformer.ln_f.weight",
        "decoder.final_layernorm.bias": "transformer.ln_f.bias",
        "output_layer.weight": "lm_head.weight",
    },
    layers={**_GPT2_LAYER, **biases(_GPT2_LAYER)},
    prefix="transformer.h",
    is_transposed=True,
)

GPT_BIGCODE = GPT2.variant(
    ("GPT-BigCode", "GPTBigCodeForCausalLM", "gpt_bigcode"),
    arguments={"num_query_groups": 1},
    fixed={"scale_attn_weights": True, "multi_query": True, "add_cross_attention": False},
    is_transposed=False,
)

STARCODER2 = LLAMA.variant(
    ("StarCoder2", "Starcoder2ForCausalLM", "starcoder2"),
    arguments={
        **ALL_WINDOWS,
        "swiglu": False,
        "openai_gelu": True,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    defaults={"num_key_value_heads": 2},
    entries={
        "layernorm_epsilon": positive_number("norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": untied(True),
        "window_size": window(),
    },
    outer=_OUTER,
    layers={**_ATTENTION, **ATTENTION_BIASES, **_C_MLP, **biases(_C_MLP)},
)

STABLELM = LLAMA.variant(
    ("StableLM", "StableLmForCausalLM", "stablelm"),
    without=["kv_channels"],
    arguments={
        "normalization": "LayerNorm",
        "kv_channels": _head_dimension,
    },
    fixed={"hidden_act": "silu", "use_parallel_residual": False, "qk_layernorm": False},
    defaults={"num_key_value_heads": 32},
    entries={
        "layernorm_epsilon": positive_number("layer_norm_eps", 1e-5),
        "add_qkv_bias": boolean("use_qkv_bias", False),
        "rotary_percent": rotated_part(0.25),
    },
    outer=_OUTER,
    layers={**_ATTENTION, **QKV_BIAS, **MLP},
)

_SQUARED_RELU = {
    **LLAMA.arguments,
    "swiglu": False,
    "squared_relu": True,
    "normalization": "LayerNorm",
}
NEMOTRON = LLAMA.variant(
    ("Nemotron", "NemotronForCausalLM", "nemotron"),
    arguments={**_SQUARED_RELU, "layernorm_zero_centered_gamma": True},
    fixed={**LLAMA.fixed, "hidden_act": "relu2"},
    entries={
        "layernorm_epsilon": positive_number("norm_eps", 1e-5),
        "rotary_percent": rotated_part(0.5),
    },
    outer=_OUTER,
    layers={**_ATTENTION, **UNGATED_MLP},
)

JAIS2 = LLAMA.variant(
    ("Jais-2", "Jais2ForCausalLM", "jais2"),
    arguments={**_SQUARED_RELU, "add_bias_linear": True},
    fixed={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    entries={"layernorm_epsilon": positive_number("layer_norm_eps", 1e-5)},
    outer=_OUTER,
    layers={**_ATTENTION, **ATTENTION_BIASES, **UNGATED_MLP, **biases(UNGATED_MLP)},
)
