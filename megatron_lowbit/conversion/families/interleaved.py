"""Families whose rotary embeddings turn neighboring channels: GLM, GLM-4, ERNIE 4.5 and Helium."""

from megatron_lowbit.conversion.families.dense import ATTENTION, GATE_UP_MLP, LLAMA, QKV_BIAS
from megatron_lowbit.conversion.families.rope import (
    TYPES_OF_PAIRS,
    rope_arguments,
    rotated_part,
)
from megatron_lowbit.conversion.family import boolean, integer, untied

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
