"""Dense models with a Llama's layers, and the names and entries from which other families start.

Llama 2 and 3, Qwen3, and Llamas with biases, windows, other names, an ungated MLP, or factors of
what is added up: Mistral, Ministral, CWM, Qwen2, Seed-OSS, SmolLM3, Phi-3, Arcee and Granite 3. The
rotary embeddings of GLM, GLM-4, ERNIE 4.5 and Helium turn neighboring channels.
"""

import math
from collections.abc import Sequence
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families.rope import (
    TYPES_OF_PAIRS,
    linear_factor,
    rope_arguments,
    rope_entries,
    rope_entry,
    rotary_base,
    rotated_part,
)
from megatron_lowbit.conversion.family import (
    Entry,
    Family,
    boolean,
    integer,
    number_of_layers,
    positive_number,
    query_groups,
    untied,
    window,
    windows,
)
from megatron_lowbit.conversion.mapping import Model, biases
from megatron_lowbit.errors import require
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


def _has_biases(entries: Entries) -> bool:
    attention, mlp = (entries.boolean(f"{part}_bias", False) for part in ("attention", "mlp"))
    require(
        attention == mlp,
        f"{CONFIG}: attention_bias {attention} with mlp_bias {mlp}: Megatron-LM has biases in both "
        "or in neither, or of queries, keys and values alone",
    )
    return attention


LLAMA_WITH_BIASES = LLAMA.variant(
    fixed={"hidden_act": "silu"},
    entries={"add_bias_linear": Entry("attention_bias", _has_biases)},
    layers={**ATTENTION, **MLP, **ATTENTION_BIASES, **biases(MLP)},
    more_entries=lambda model: {**rope_entry(model), "mlp_bias": model["add_bias_linear"]},
)

MISTRAL = LLAMA.variant(
    ("Mistral", "MistralForCausalLM", "mistral"),
    arguments=ALL_WINDOWS,
    fixed={"hidden_act": "silu"},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    entries={"window_size": window()},
)

QWEN2 = LLAMA.variant(
    ("Qwen2", "Qwen2ForCausalLM", "qwen2"),
    arguments={"add_qkv_bias": True},
    fixed={"hidden_act": "silu"},
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    entries=QWEN_WINDOWS,
    layers={**ATTENTION, **QKV_BIAS, **MLP},
    more_entries=qwen_entries,
)

SEED_OSS = LLAMA.variant(
    ("Seed-OSS", "SeedOssForCausalLM", "seed_oss"),
    fixed={"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    entries={"add_qkv_bias": boolean("attention_bias", True)},
    layers={**ATTENTION, **QKV_BIAS, **MLP},
)


def _layers_without_rope(entries: Entries) -> list[int]:
    """Return 1 for each layer without rotary embeddings, else 0: by default every fourth."""
    layers, step = number_of_layers(entries), entries.integer("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % step != 0) for layer in range(layers)]
    rotated = (entries.integers("no_rope_layers") or usual)[:layers]  # transformers' may be longer
    is_pattern = len(rotated) == layers and {*rotated} <= {0, 1}
    require(is_pattern, f"{CONFIG}: no_rope_layers must be 1 or 0 for each of {layers} layers")
    return [1 - has for has in rotated]


def _rotated(skips: Sequence[int] | None) -> list[int]:
    require(skips is not None, "the model has no no_rope_freq; a SmolLM3 has it")
    return [1 - skip for skip in skips or ()]


SMOLLM3 = LLAMA_WITH_BIASES.variant(
    ("SmolLM3", "SmolLM3ForCausalLM", "smollm3"),
    fixed={**LLAMA_WITH_BIASES.fixed, "use_sliding_window": False},
    defaults={"num_key_value_heads": 4},
    entries={
        "rotary_base": rotary_base("rope_theta", 2_000_000),
        "untie_embeddings_and_output_weights": untied(True),
        "no_rope_freq": Entry("no_rope_layers", _layers_without_rope, _rotated),
    },
)


PHI3 = MISTRAL.variant(
    ("Phi-3", "Phi3ForCausalLM", "phi3"),
    defaults={"rms_norm_eps": 1e-5},
    entries={"rotary_percent": rotated_part(1.0)},
    layers={**ATTENTION, **QKV_PROJ, **GATE_UP_MLP},
)

MINISTRAL = MISTRAL.variant(
    ("Ministral", "MinistralForCausalLM", "ministral"),
    entries={
        "window_attn_skip_freq": windows(
            lambda entries: (
                [entries.integer("sliding_window", 0, minimum=0) > 0] * number_of_layers(entries)
            )
        ),
    },
)

CWM = LLAMA.variant(
    ("CWM", "CwmForCausalLM", "cwm"),
    fixed={"hidden_act": "silu", "mlp_bias": False},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000,
        "sliding_window": 8192,
    },
    entries={
        "kv_channels": integer("head_dim", 128),
        "window_size": window(),
        "window_attn_skip_freq": windows(
            lambda entries: [layer % 4 != 0 for layer in range(number_of_layers(entries))]
        ),
    },
    more_arguments=lambda entries: rope_arguments(entries, "llama3"),
)

ARCEE = LLAMA.variant(
    ("Arcee", "ArceeForCausalLM", "arcee"),
    arguments={"swiglu": False, "squared_relu": True},
    fixed={**LLAMA.fixed, "hidden_act": "relu2"},
    defaults={"rms_norm_eps": 1e-5},
    layers={**ATTENTION, **UNGATED_MLP},
)


_FACTORS = {"above": 1e-150, "up_to": 1e150}
"""Bounds of factors whose squares and inverses are finite, and not 0."""


def _inverse(value: Any) -> float:
    return 1 / (value or 1.0)


GRANITE = LLAMA_WITH_BIASES.variant(
    ("Granite", "GraniteForCausalLM", "granite"),
    arguments={"use_mup": True, "mup_attn_scale_power": 0.0},
    entries={
        "mup_embedding_mult": positive_number("embedding_multiplier", 1.0),
        # The scale of attention scores is the root of this.
        "mup_base_head_dim": Entry(
            "attention_multiplier",
            lambda entries: entries.number("attention_multiplier", 1.0, **_FACTORS) ** 2,
            math.sqrt,
        ),
        "mup_output_mult": Entry(
            "logits_scaling",
            lambda entries: _inverse(entries.number("logits_scaling", 1.0, **_FACTORS)),
            _inverse,
        ),
        "residual_multiplier": positive_number("residual_multiplier", 1.0)._replace(
            write=lambda factor: factor or 1.0
        ),
    },
)


_INTERLEAVED = LLAMA.variant(
    arguments={"rotary_interleaved": True},
    entries={"kv_channels": integer("head_dim", 128)},
    more_arguments=lambda entries: rope_arguments(entries, *TYPES_OF_PAIRS),
)

GLM = _INTERLEAVED.variant(
    ("GLM", "GlmForCausalLM", "glm"),
    fixed={"hidden_act": "silu"},
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07},
    entries={
        "add_qkv_bias": boolean("attention_bias", True),
        "rotary_percent": rotated_part(0.5),
    },
    layers={**ATTENTION, **QKV_BIAS, **GATE_UP_MLP},
)

GLM4 = GLM.variant(
    ("GLM-4", "Glm4ForCausalLM", "glm4"),
    arguments={"sandwich_norm": True},
    layers={
        **ATTENTION,
        **QKV_BIAS,
        **GATE_UP_MLP,
        "self_attn_bda.post_layernorm.weight": "post_self_attn_layernorm.weight",
        "mlp_bda.post_layernorm.weight": "post_mlp_layernorm.weight",
    },
)

ERNIE = _INTERLEAVED.variant(
    ("ERNIE-4.5", "Ernie4_5ForCausalLM", "ernie4_5"),
    fixed={"hidden_act": "silu", "use_bias": False},
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500_000},
    entries={"untie_embeddings_and_output_weights": untied(True)},
)

HELIUM = _INTERLEAVED.variant(
    ("Helium", "HeliumForCausalLM", "helium"),
    defaults={"num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 100_000},
)
