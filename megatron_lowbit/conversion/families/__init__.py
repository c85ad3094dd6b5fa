"""Families of models that are converted, one file each."""

from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families import (
    deepseek_v3,
    gemma3,
    gpt2,
    gpt_oss,
    llama,
    mixtral,
    nemotron_h,
    qwen3,
    qwen3_moe,
)
from megatron_lowbit.conversion.family import ConvertibleModel, Family
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries

FAMILIES = {
    module.FAMILY.architecture: module.FAMILY
    for module in (nemotron_h, deepseek_v3, gpt_oss, gemma3, qwen3_moe, qwen3, mixtral, gpt2, llama)
}
"""Families by architecture in config.json."""


def from_config(config: dict[str, Any], place: str = CONFIG) -> ConvertibleModel:
    """Return the model that a config.json describes; ``place`` is its file, for errors.

    Raises UserError where no family is of its architecture, or does not take its entries.
    """
    entries = Entries(config, place)
    names = entries.strings("architectures") or [entries.string("model_type", "none")]
    if names[0] not in FAMILIES:
        raise UserError(f"{place}: architecture {names[0]} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[names[0]].from_config(config)


def family_of(model: Model) -> Family:
    """Return the only family that a trained model can be of; its ``to_config`` checks the model."""
    if "hybrid_layer_pattern" in model:
        return nemotron_h.FAMILY
    if "multi_latent_attention" in model:
        return deepseek_v3.FAMILY
    if "softmax_type" in model:
        return gpt_oss.FAMILY
    if "sandwich_norm" in model:
        return gemma3.FAMILY
    if "num_experts" in model:
        return qwen3_moe.FAMILY if "qk_layernorm" in model else mixtral.FAMILY
    if "qk_layernorm" in model:
        return qwen3.FAMILY
    if model["position_embedding_type"] == "learned_absolute":
        return gpt2.FAMILY
    return llama.FAMILY
