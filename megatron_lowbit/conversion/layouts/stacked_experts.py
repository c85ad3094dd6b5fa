"""Experts of a layer that Hugging Face stores in one tensor, as gpt-oss does.

The mapping of tensors has each expert by itself, as other families do: ``experts.3.gate_proj``,
``up_proj`` and ``down_proj``, each with ``weight`` (out, in) and ``bias``. E experts are stored as
``experts.gate_up_proj`` (E, in, out) and ``gate_up_proj_bias`` (E, out), in which outputs of gate
and up alternate, gate first, and as ``experts.down_proj`` and ``down_proj_bias``. Source:
transformers' GptOssExperts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import LazyTensors
from megatron_lowbit.conversion.layouts.layout import Stored, modules_with
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries

PAIR, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
OUTPUTS = {"gate_proj": (PAIR, slice(0, None, 2)), "up_proj": (PAIR, slice(1, None, 2)),
           "down_proj": (DOWN, slice(None))}  # fmt: skip
"""Stored tensor of a linear layer of each expert, and its outputs there."""
_BIAS = "_bias"
_EXPERT = re.compile(r"(.+\.)mlp\.experts\.\d+\.(\w+)\.(weight|bias)")
_MODEL_TYPES = ("gpt_oss",)
_MOST = 2**10
"""The most experts of a layer."""


def number_of_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer that a config.json has, by whatever name."""
    entries, experts = Entries(config, "config.json"), 0
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        experts = entries.integer(key, experts, 0, _MOST)
    return experts


def stored_experts(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Describe each expert's weights and biases in a folder's tensors; {} for other models."""
    if config.get("model_type") not in _MODEL_TYPES:
        return {}
    names, found = list(names), {}
    for role, (stored, outputs) in OUTPUTS.items():
        for kind, ending in (("weight", ""), ("bias", _BIAS)):
            for layer in modules_with(names, stored + ending):
                for number in range(number_of_experts(config)):
                    name = f"{layer}mlp.experts.{number}.{role}.{kind}"
                    found[name] = _one_of(layer + stored + ending, number, outputs)
    return found


def _one_of(name: str, number: int, outputs: slice) -> Stored:
    """Describe outputs of one expert in a weight (in, out) or a bias (out)."""

    def decode(expert: Tensor) -> Tensor:
        own = expert[..., outputs]
        return own.t() if own.ndim == 2 else own

    return Stored((name,), None, decode, number)


def check_experts(quantized: Iterable[str], config: Mapping[str, Any], layout: str) -> None:
    """Raise UserError for quantized experts that no reader takes one by one.

    Args:
        quantized: names of the quantized weights.
        config: the model's config.json.
        layout: the layout's name.
    """
    if layout == "gpt-oss" or config.get("model_type") not in _MODEL_TYPES:
        return
    for name in filter(_EXPERT.fullmatch, quantized):
        raise UserError(
            f"--quantized {layout}: readers of gpt-oss take no experts in it, and the recipe "
            f"quantizes {name}: choose --quantized gpt-oss, or a recipe that keeps experts in BF16"
        )


def stack_experts(
    contents: Sequence[LazyTensors], config: Mapping[str, Any]
) -> Sequence[LazyTensors]:
    """Return a model's tensors with each layer's experts in those that Hugging Face stores."""
    if config.get("model_type") not in _MODEL_TYPES:
        return contents
    groups: dict[str, list[LazyTensors]] = {}
    for content in contents:
        name = next(iter(content.outline))
        groups.setdefault(_stored_name(name) or name, []).append(content)
    return [
        _stacked(name, members) if _stored_name(next(iter(members[0].outline))) else members[0]
        for name, members in groups.items()
    ]


def _stored_name(name: str) -> str | None:
    """Return the tensor that has one of an expert's in it; None for other tensors."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    layer, role, kind = match.groups()
    return layer + OUTPUTS[role][0] + (_BIAS if kind == "bias" else "")


def _stacked(name: str, experts: Sequence[LazyTensors]) -> LazyTensors:
    """Return the tensor ``name`` of a layer's experts, in their order."""

    def stack(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        by_role: dict[str, list[Tensor]] = {}
        for part in parts:
            for own, tensor in part.items():
                by_role.setdefault(_EXPERT.fullmatch(own)[2], []).append(tensor)
        stacked = [torch.stack(by_role[role]) for role in OUTPUTS if role in by_role]
        whole = torch.stack(stacked, dim=2).flatten(1, 2)
        return {name: whole.transpose(1, 2) if whole.ndim == 3 else whole}

    outline = stack(expert.outline for expert in experts)
    return LazyTensors(outline, lambda: stack(expert.make() for expert in experts))
