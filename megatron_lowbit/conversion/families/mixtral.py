"""Mixtral: a Llama whose MLPs are experts, the best two or so for each token."""

from dataclasses import replace

from megatron_lowbit.conversion.families import llama
from megatron_lowbit.conversion.family import experts, experts_of_a_token, integer

_EXPERTS = {
    "decoder.layers.*.mlp.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "decoder.layers.*.mlp.experts.experts.*.linear_fc1.weight": (
        "model.layers.*.block_sparse_moe.experts.*.w1.weight",
        "model.layers.*.block_sparse_moe.experts.*.w3.weight",
    ),
    "decoder.layers.*.mlp.experts.experts.*.linear_fc2.weight": (
        "model.layers.*.block_sparse_moe.experts.*.w2.weight"
    ),
}


_COUNT = experts("num_local_experts")

FAMILY = replace(
    llama.FAMILY,
    name="Mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    arguments={**llama.FAMILY.arguments, "moe_layer_freq": 1, "moe_router_pre_softmax": False},
    fixed={**llama.FAMILY.fixed, "sliding_window": None},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000},
    entries={
        **llama.FAMILY.entries,
        "num_experts": _COUNT,
        "moe_router_topk": experts_of_a_token(_COUNT),
        "moe_ffn_hidden_size": integer("intermediate_size"),
    },
    tensors=lambda model: {**llama.ATTENTION, **_EXPERTS, **llama.OUTPUT},
)
