"""Families of models that are converted: configurations and tables of tensors."""

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families.dense import QWEN3
from megatron_lowbit.conversion.families.experts import (
    GPT_OSS,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
)
from megatron_lowbit.conversion.families.gemma import GEMMA, GEMMA3
from megatron_lowbit.conversion.families.hybrids import BAMBA, MAMBA2, NEMOTRON_H
from megatron_lowbit.conversion.families.interleaved import ERNIE, GLM, GLM4, HELIUM
from megatron_lowbit.conversion.families.latent_attention import DEEPSEEK_V2, DEEPSEEK_V3, YOUTU
from megatron_lowbit.conversion.families.layer_norms import (
    GPT2,
    GPT_BIGCODE,
    JAIS2,
    NEMOTRON,
    STABLELM,
    STARCODER2,
)
from megatron_lowbit.conversion.families.llamas import (
    ARCEE,
    CWM,
    GRANITE,
    LLAMA_WITH_BIASES,
    MINISTRAL,
    MISTRAL,
    PHI3,
    QWEN2,
    SEED_OSS,
    SMOLLM3,
)
from megatron_lowbit.conversion.families.refused import REFUSED
from megatron_lowbit.conversion.families.sigmoid_router import DOTS1, GLM4_MOE, SOLAR_OPEN
from megatron_lowbit.conversion.family import ConvertibleModel, Family
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

FAMILIES = {
    family.architecture: family
    for family in (
        NEMOTRON_H, DEEPSEEK_V3, GPT_OSS, GEMMA3, QWEN3_MOE, QWEN3, MIXTRAL, GPT2,
        LLAMA_WITH_BIASES, MISTRAL, MINISTRAL, CWM, QWEN2, SEED_OSS, SMOLLM3, PHI3, ARCEE,
        GEMMA, GLM, GLM4, ERNIE, HELIUM, GPT_BIGCODE, STARCODER2, STABLELM, NEMOTRON, JAIS2,
        QWEN2_MOE, GLM4_MOE, DOTS1, SOLAR_OPEN, BAMBA, MAMBA2, DEEPSEEK_V2, YOUTU, GRANITE,
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
    ("no_rope_freq",): SMOLLM3,
    ("add_qkv_bias",): QWEN2,
    ("window_size",): MISTRAL,
}
"""Families by the arguments that their models have; a model is of the first family that fits."""


def from_config(config: dict[str, Any], file: str = CONFIG) -> ConvertibleModel:
    """Return the model that a config.json describes; ``file`` is its file, for errors.

    Raises UserError where no family is of its architecture, or does not take its entries.
    """
    entries = Entries(config, file)
    names = entries.strings("architectures") or [entries.string("model_type", "none")]
    if names[0] in REFUSED:
        reason, nearest = REFUSED[names[0]]
        raise UserError(
            f"{file}: architecture {names[0]} {reason}. The nearest that is converted is {nearest} "
            "(docs/conversion.md)"
        )
    if names[0] not in FAMILIES:
        raise UserError(
            f"{file}: architecture {names[0]} is not one of the {len(FAMILIES)} that are "
            "converted; docs/conversion.md lists them"
        )
    family = FAMILIES[names[0]]
    model_type = entries.string("model_type", family.model_type)
    others = {other.model_type for other in FAMILIES.values()} - {family.model_type}
    message = f"{file}: model_type {model_type!r} is not the type of architecture {names[0]}"
    require(model_type not in others, message)
    if family is MISTRAL and "layer_types" in entries:
        family = MINISTRAL  # as AutoModelForCausalLM reads the file of Ministral 8B
    return family.from_config(config)


def family_of(model: Model, config: Mapping[str, Any] = MappingProxyType({})) -> Family:
    """Return the family of a trained model; its ``to_config`` checks the model.

    A model can be of several, such as Llama and Phi-3. It is of the one that ``config``, the
    config.json that it was trained from, names, or else of the most common one. Where none takes
    it, the family is the one whose arguments are closest.
    """
    is_gpt = model["position_embedding_type"] == "learned_absolute"
    closest = GPT2 if is_gpt else LLAMA_WITH_BIASES
    for arguments, marked in _MARKS.items():
        if model.keys() >= {*arguments}:
            closest = marked
            break
    named = [FAMILIES[name] for name in config.get("architectures") or [] if name in FAMILIES]
    for family in [*named, closest, *FAMILIES.values()]:
        with suppress(UserError):
            family.to_config(model)
            return family
    return closest
