"""Qwen3-MoE: a Qwen3 of which all or some layers have experts."""

from dataclasses import replace
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.checkpoints.model_arguments import MOST_LAYERS
from megatron_lowbit.conversion.families import llama, qwen3
from megatron_lowbit.conversion.family import Entry, experts, experts_of_a_token, integer
from megatron_lowbit.conversion.mapping import Model, TensorTable, by_layer
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

EXPERTS = {
    "decoder.layers.*.mlp.router.weight": "model.layers.*.mlp.gate.weight",
    "decoder.layers.*.mlp.experts.experts.*.linear_fc1.weight": (
        "model.layers.*.mlp.experts.*.gate_proj.weight",
        "model.layers.*.mlp.experts.*.up_proj.weight",
    ),
    "decoder.layers.*.mlp.experts.experts.*.linear_fc2.weight": (
        "model.layers.*.mlp.experts.*.down_proj.weight"
    ),
}
_COUNT = experts(
    "num_experts",
    # transformers' newer name.
    lambda entries: entries.integer("num_local_experts", 0, least=0) or None,
)
_OF_A_TOKEN = experts_of_a_token(_COUNT)


def _tensors(model: Model) -> TensorTable:
    return by_layer({**qwen3.ATTENTION, **llama.OUTPUT}, llama.MLP, EXPERTS, model)


def _layers_with_experts(entries: Entries) -> int | list[int]:
    """Return 1 if all layers have experts, else 1 or 0 for each layer."""
    layers = entries.integer("num_hidden_layers", most=MOST_LAYERS)
    step, dense = entries.integer("decoder_sparse_step", 1), entries.integers("mlp_only_layers")
    if unknown := [layer for layer in dense if not 0 <= layer < layers]:
        raise UserError(f"{CONFIG}: mlp_only_layers {unknown[0]}: the model has {layers} layers")
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    require(any(pattern), f"{CONFIG}: mlp_only_layers and decoder_sparse_step leave no experts")
    return 1 if all(pattern) else pattern


def _is_softmax_of_all(entries: Entries) -> bool:
    """Return True if probabilities are those among all experts, not among a token's."""
    normalized = entries.boolean("norm_topk_prob", False)
    require(
        not normalized or _OF_A_TOKEN.read(entries) > 1,
        f"{CONFIG}: norm_topk_prob: Megatron-LM does not normalize the probability of one expert",
    )
    return not normalized


def _dense_layers(model: Model) -> dict[str, Any]:
    frequency = model["moe_layer_freq"]
    pattern = [] if frequency == 1 else frequency
    dense = [layer for layer, has_experts in enumerate(pattern) if not has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


FAMILY = replace(
    qwen3.FAMILY,
    name="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={"num_key_value_heads": 4},
    entries={
        **llama.FAMILY.entries,
        "num_experts": _COUNT,
        "moe_router_topk": _OF_A_TOKEN,
        "moe_router_pre_softmax": Entry(
            "norm_topk_prob", _is_softmax_of_all, lambda of_all: not of_all
        ),
        "moe_ffn_hidden_size": integer("moe_intermediate_size", 768),
    },
    tensors=_tensors,
    more_arguments=lambda entries: {
        **llama.FAMILY.more_arguments(entries),
        "moe_layer_freq": _layers_with_experts(entries),
    },
    more_entries=lambda model: {**llama.FAMILY.more_entries(model), **_dense_layers(model)},
)
