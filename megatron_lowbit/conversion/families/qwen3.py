"""Qwen3: a Llama with a norm of each head's query and key."""

from dataclasses import replace

from megatron_lowbit.conversion.families import llama
from megatron_lowbit.conversion.family import integer

ATTENTION = {
    **llama.ATTENTION,
    "decoder.layers.*.self_attention.q_layernorm.weight": "model.layers.*.self_attn.q_norm.weight",
    "decoder.layers.*.self_attention.k_layernorm.weight": "model.layers.*.self_attn.k_norm.weight",
}

FAMILY = replace(
    llama.FAMILY,
    name="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    arguments={**llama.FAMILY.arguments, "qk_layernorm": True},
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    entries={**llama.FAMILY.entries, "kv_channels": integer("head_dim", 128)},
    tensors=lambda model: {**ATTENTION, **llama.MLP, **llama.OUTPUT},
)
