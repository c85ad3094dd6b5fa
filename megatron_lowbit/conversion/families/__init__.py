"""Families of models that are converted: configurations and tables of tensors."""

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.families import (
    dense,
    experts,
    gemma,
    hybrids,
    latent_attention,
    layer_norms,
)
from megatron_lowbit.conversion.families.refused import REFUSED
from megatron_lowbit.conversion.family import ConvertibleModel, Family
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

FAMILIES = {
    family.architecture: family
    for family in (
        hybrids.NEMOTRON_H, latent_attention.DEEPSEEK_V3, experts.GPT_OSS, gemma.GEMMA3,
        experts.QWEN3_MOE, dense.QWEN3, experts.MIXTRAL, layer_norms.GPT2, dense.LLAMA_WITH_BIASES,
        dense.MISTRAL, dense.MINISTRAL, dense.CWM, dense.QWEN2, dense.SEED_OSS, dense.SMOLLM3,
        dense.PHI3, dense.ARCEE, gemma.GEMMA, dense.GLM, dense.GLM4, dense.ERNIE, dense.HELIUM,
        layer_norms.GPT_BIGCODE, layer_norms.STARCODER2, layer_norms.STABLELM, layer_norms.NEMOTRON,
        layer_norms.JAIS2, experts.QWEN2_MOE, experts.GLM4_MOE, experts.DOTS1, experts.SOLAR_OPEN,
        hybrids.BAMBA, hybrids.MAMBA2, latent_attention.DEEPSEEK_V2, latent_attention.YOUTU,
        dense.GRANITE,
    )
}  # fmt: skip
"""Families by architecture in config.json."""
_MARKS = {
    ("hybrid_layer_pattern",): hybrids.NEMOTRON_H,
    ("multi_latent_attention",): latent_attention.DEEPSEEK_V3,
    ("softmax_type",): experts.GPT_OSS,
    ("sandwich_norm",): gemma.GEMMA3,
    ("num_experts", "qk_layernorm"): experts.QWEN3_MOE,
    ("num_experts",): experts.MIXTRAL,
    ("qk_layernorm",): dense.QWEN3,
    ("no_rope_freq",): dense.SMOLLM3,
    ("add_qkv_bias",): dense.QWEN2,
    ("window_size",): dense.MISTRAL,
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
    if family is dense.MISTRAL and "layer_types" in entries:
        family = dense.MINISTRAL  # as AutoModelForCausalLM reads the file of Ministral 8B
    return family.from_config(config)


def family_of(model: Model, config: Mapping[str, Any] = MappingProxyType({})) -> Family:
    """Return the family of a trained model; its ``to_config`` checks the model.

    A model can be of several, such as Llama and Phi-3. It is of the one that ``config``, the
    config.json that it was trained from, names, or else of the most common one. Where none takes
    it, the family is the one whose arguments are closest.
    """
    is_gpt = model["position_embedding_type"] == "learned_absolute"
    closest = layer_norms.GPT2 if is_gpt else dense.LLAMA_WITH_BIASES
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
