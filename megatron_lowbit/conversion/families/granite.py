"""Granite 3: a Llama with factors of embeddings, attention scores, residuals and logits."""

import math
from dataclasses import replace
from typing import Any

from megatron_lowbit.conversion.families.llamas import LLAMA_WITH_BIASES
from megatron_lowbit.conversion.family import Entry, positive_number


def _inverse(value: Any) -> float:
    return 1 / (value or 1.0)


GRANITE = replace(
    LLAMA_WITH_BIASES,
    name="Granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    arguments={**LLAMA_WITH_BIASES.arguments, "use_mup": True, "mup_attn_scale_power": 0.0},
    entries={
        **LLAMA_WITH_BIASES.entries,
        "mup_embedding_mult": positive_number("embedding_multiplier", 1.0),
        # The scale of attention scores is the root of this.
        "mup_base_head_dim": Entry(
            "attention_multiplier",
            lambda entries: entries.number("attention_multiplier", 1.0, above=0) ** 2,
            math.sqrt,
        ),
        "mup_output_mult": Entry(
            "logits_scaling",
            lambda entries: _inverse(entries.number("logits_scaling", 1.0, above=0)),
            _inverse,
        ),
        "residual_multiplier": positive_number("residual_multiplier", 1.0)._replace(
            write=lambda factor: factor or 1.0
        ),
    },
)
