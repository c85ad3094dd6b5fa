"""Llama 2 and 3, and Qwen3: names and entries from which other families start."""

from typing import Any

from megatron_lowbit.conversion.families.rope import (
    linear_factor,
    rope_arguments,
    rope_entries,
    rope_entry,
    rotary_base,
)
from megatron_lowbit.conversion.family import (
    Entry,
    Family,
    integer,
    number_of_layers,
    positive_number,
    query_groups,
    untied,
    window,
    windows,
)
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.json_files import Entries

OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attn.{q,k,v}_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
QWEN3_ATTENTION = {
    **ATTENTION,
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
MLP = {
    "mlp.linear_fc1.weight": "mlp.{gate,up}_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
QKV_BIAS = {"self_attention.linear_qkv.bias": "self_attn.{q,k,v}_proj.bias"}
ATTENTION_BIASES = {**QKV_BIAS, "self_attention.linear_proj.bias": "self_attn.o_proj.bias"}
QKV_PROJ = {"self_attention.linear_qkv.weight": "self_attn.qkv_proj.weight"}
GATE_UP_MLP = MLP | {"mlp.linear_fc1.weight": "mlp.gate_up_proj.weight"}
UNGATED_MLP = MLP | {"mlp.linear_fc1.weight": "mlp.up_proj.weight"}

ALL_WINDOWS = {
    "window_attn_skip_freq": lambda model: (
        [1] * model["num_layers"] if model.get("window_size") else None
    ),
}
"""Argument of a model whose layers all have a window, or none."""


def _last_layers(entries: Entries) -> list[bool]:
    """Return True for each layer that has a window in files without ``layer_types``."""
    first = entries.integer("max_window_layers", 28, minimum=0)
    return [layer >= first for layer in range(number_of_layers(entries))]


def _if_used(entry: Entry) -> Entry:
    """Return an entry that is read only if ``use_sliding_window`` enables a window."""

    def read(entries: Entries) -> Any:
        is_used = entries.boolean("use_sliding_window", False) and window().read(entries)
        return entry.read(entries) if is_used else None

    return entry._replace(read=read)


QWEN_WINDOWS = {
    "window_size": _if_used(window()),
    "window_attn_skip_freq": _if_used(windows(_last_layers)),
}
"""Windows of Qwen2 and Qwen3."""


def qwen_entries(model: Model) -> dict[str, Any]:
    """Return the entries of scaled frequencies, and the entry that enables windows."""
    return {**rope_entry(model), "use_sliding_window": bool(model.get("window_size"))}


def _head_dimension(entries: Entries) -> int:
    default = entries.integer("hidden_size") // entries.integer("num_attention_heads")
    return entries.integer("head_dim", default)


LLAMA = Family(
    name="Llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    arguments={
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": lambda model: "yarn" if "yarn_beta_fast" in model else "rope",
        "rotary_percent": 1.0,
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    entries={
        "num_layers": Entry("num_hidden_layers", number_of_layers),
        "hidden_size": integer("hidden_size"),
        "ffn_hidden_size": integer("intermediate_size"),
        "num_attention_heads": integer("num_attention_heads"),
        "num_query_groups": Entry("num_key_value_heads", query_groups),
        "kv_channels": Entry("head_dim", _head_dimension),
        "layernorm_epsilon": positive_number("rms_norm_eps", 1e-6),
        "rotary_base": rotary_base("rope_theta", 10_000),
        "rotary_seq_len_interpolation_factor": Entry(
            "rope_scaling", lambda entries: linear_factor(rope_entries(entries))
        ),
        "max_position_embeddings": integer("max_position_embeddings"),
        "untie_embeddings_and_output_weights": untied(False),
        "vocab_size": integer("vocab_size"),
    },
    outer=OUTER,
    layers={**ATTENTION, **MLP},
    more_arguments=rope_arguments,
    more_entries=rope_entry,
)

QWEN3 = LLAMA.variant(
    ("Qwen3", "Qwen3ForCausalLM", "qwen3"),
    arguments={"qk_layernorm": True},
    fixed={"hidden_act": "silu", "attention_bias": False},
    defaults={"sliding_window": 4096},
    entries={**QWEN_WINDOWS, "kv_channels": integer("head_dim", 128)},
    layers={**QWEN3_ATTENTION, **MLP},
    more_entries=qwen_entries,
)
