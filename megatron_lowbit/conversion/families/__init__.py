"""Families of models that are converted: configurations and tables of tensors."""

from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families.deepseek_v3 import DEEPSEEK_V3
from megatron_lowbit.conversion.families.dense import GEMMA3, GPT2, LLAMA, QWEN3
from megatron_lowbit.conversion.families.experts import GPT_OSS, MIXTRAL, QWEN3_MOE
from megatron_lowbit.conversion.families.nemotron_h import NEMOTRON_H
from megatron_lowbit.conversion.family import ConvertibleModel, Family
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries

FAMILIES = {
    family.architecture: family
    for family in (
        NEMOTRON_H, DEEPSEEK_V3, GPT_OSS, GEMMA3, QWEN3_MOE, QWEN3, MIXTRAL, GPT2, LLAMA,
    )
}  # fmt: skip
"""Families by architecture in config.json."""
_MARKS = {
    ("hybrid_layer_pattern",): NEMOTRON_H,
    ("multi_latent_attention",): DEEPSEEK_V3,
    ("softmax_type",): GPT_OSS,
    ("sandwich_norm",): GEMMA3,
    ("num_experts", "qk_layernorm"): QWEN3_MOE,
    ("num_experts",): MIXTRAL,
    ("qk_layernorm",): QWEN3,
}
"""Families by the arguments that their models have; a model is of the first family that fits."""


def from_config(config: dict[str, Any], file: str = CONFIG) -> ConvertibleModel:
    """Return the model that a config.json describes; ``file`` is its file, for errors.

    Raises UserError where no family is of its architecture, or does not take its entries.
    """
    entries = Entries(config, file)
    names = entries.strings("architectures") or [entries.string("model_type", "none")]
    if names[0] not in FAMILIES:
        raise UserError(f"{file}: architecture {names[0]} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[names[0]].from_config(config)


def family_of(model: Model) -> Family:
    """Return the only family that a trained model can be of; its ``to_config`` checks the model."""
    for arguments, family in _MARKS.items():
        if model.keys() >= {*arguments}:
            return family
    return GPT2 if model["position_embedding_type"] == "learned_absolute" else LLAMA
