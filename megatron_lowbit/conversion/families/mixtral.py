"""Mixtral: a Llama whose MLPs are experts, the best two or so for each token."""

from dataclasses import replace

from megatron_lowbit.checkpoints.model_arguments import MOST_EXPERTS, MOST_LAYERS
from megatron_lowbit.conversion.families import llama
from megatron_lowbit.conversion.family import Entry, integer
from megatron_lowbit.json_files import Entries

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


def _experts(entries: Entries) -> int:
    layers = entries.integer("num_hidden_layers", most=MOST_LAYERS)
    return entries.integer("num_local_experts", most=MOST_EXPERTS // layers)


def _experts_of_a_token(entries: Entries) -> int:
    return entries.integer("num_experts_per_tok", most=_experts(entries))


FAMILY = replace(
    llama.FAMILY,
    name="Mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    arguments={**llama.FAMILY.arguments, "moe_layer_freq": 1, "moe_router_pre_softmax": False},
    fixed={**llama.FAMILY.fixed, "sliding_window": None},
    entries={
        **llama.FAMILY.entries,
        "num_experts": Entry("num_local_experts", _experts),
        "moe_router_topk": Entry("num_experts_per_tok", _experts_of_a_token),
        "moe_ffn_hidden_size": integer("intermediate_size"),
    },
    tensors=lambda model: {**llama.ATTENTION, **_EXPERTS, **llama.OUTPUT},
)
