"""Experts of a layer in one tensor, as Hugging Face's gpt-oss has them: in BF16, or in MXFP4.

The mapping of tensors has each expert by itself, as other families do: ``experts.3.gate_proj``,
``up_proj`` and ``down_proj``, each with ``weight`` (out, in) and ``bias``. E experts are stored as
``experts.gate_up_proj`` (E, in, out) and ``gate_up_proj_bias`` (E, out), in which outputs of gate
and up alternate, gate first, and as ``experts.down_proj`` and ``down_proj_bias``.

In MXFP4 ``gate_up_proj_blocks`` are bytes (E, out, in/32, 16), two E2M1 codes a byte, the even
column in the low nibble, and ``gate_up_proj_scales`` E8M0 bytes (E, out, in/32). Other models'
experts are stored so, too, which their own readers do not know.

Source: openai/gpt-oss; transformers' GptOssExperts and its reader of MXFP4.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import LazyTensors
from megatron_lowbit.conversion.layouts.layout import (
    Layout,
    Modules,
    Stored,
    decode_blocks,
    modules_with,
)
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries
from megatron_lowbit.numerics import QuantizedTensor

METHOD = "mxfp4"
_PAIR, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_OUTPUTS = {"gate_proj": (_PAIR, slice(0, None, 2)), "up_proj": (_PAIR, slice(1, None, 2)),
            "down_proj": (_DOWN, slice(None))}  # fmt: skip
"""Stored tensor of a linear layer of each expert, and its outputs there."""
_NAMES = {"block_sparse_moe": ("w1", "w3", "w2"), "mlp": tuple(_OUTPUTS)}
"""Names of gate, up and down by the name of a layer of experts."""
_EXPERT = re.compile(r"(.+\.)(block_sparse_moe|mlp)\.experts\.\d+\.(\w+)(?:\.(weight|bias))?")
_BIAS = "_bias"
_MODEL_TYPES = ("gpt_oss",)
_MOST = 2**10
"""The most experts of a layer."""
_BYTES = 16
"""Bytes of a block of 32 codes."""


def _number_of_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer that a config.json has, by whatever name."""
    entries, experts = Entries(config, "config.json"), 0
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        experts = entries.integer(key, experts, 0, _MOST)
    return experts


def stored_experts(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Describe each expert's weights and biases in a folder's tensors; {} for other models."""
    if config.get("model_type") not in _MODEL_TYPES:
        return {}
    names = list(names)
    return {
        f"{layer}mlp.experts.{number}.{role}.{kind}": _one_of(
            layer + stored + ending, number, outputs
        )
        for role, (stored, outputs) in _OUTPUTS.items()
        for kind, ending in (("weight", ""), ("bias", _BIAS))
        for layer in modules_with(names, stored + ending)
        for number in range(_number_of_experts(config))
    }


def _one_of(name: str, number: int, outputs: slice) -> Stored:
    """Describe outputs of one expert in a weight (in, out) or a bias (out)."""

    def decode(expert: Tensor) -> Tensor:
        chosen = expert[..., outputs]
        return chosen.t() if chosen.ndim == 2 else chosen

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
        groups.setdefault(_stored_name(name), []).append(content)
    return [
        members[0] if name in members[0].outline else _stacked(name, members)
        for name, members in groups.items()
    ]


def _stored_name(name: str) -> str:
    """Return the tensor that has one of an expert's in it; other tensors are stored as they are."""
    match = _EXPERT.fullmatch(name)
    if match is None or match[4] is None:
        return name
    layer, _, role, kind = match.groups()
    return layer + _OUTPUTS[role][0] + (_BIAS if kind == "bias" else "")


def _stacked(name: str, experts: Sequence[LazyTensors]) -> LazyTensors:
    """Return the tensor ``name`` of a layer's experts, in their order."""

    def stack(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        by_role: dict[str, list[Tensor]] = {}
        for part in parts:
            for expert, tensor in part.items():
                by_role.setdefault(_EXPERT.fullmatch(expert)[3], []).append(tensor)
        stacked = [torch.stack(by_role[role]) for role in _OUTPUTS if role in by_role]
        whole = torch.stack(stacked, dim=2).flatten(1, 2)
        return {name: whole.transpose(1, 2) if whole.ndim == 3 else whole}

    outline = stack(expert.outline for expert in experts)
    return LazyTensors(outline, lambda: stack(expert.make() for expert in experts))


def _encode(weights: Mapping[str, QuantizedTensor]) -> dict[str, Tensor]:
    """Return a layer's tensors in MXFP4, of all its experts' gate, up and down."""
    by_role: list[list[QuantizedTensor]] = [[], [], []]
    for name, weight in weights.items():
        _, family, role, _ = _EXPERT.match(name).groups()
        by_role[_NAMES[family].index(role)].append(weight)
    layer = _layer(next(iter(weights)))
    tensors = {}
    for key, ending in (("codes", "_blocks"), ("scales", "_scales")):
        gate, up, down = (
            torch.stack([getattr(expert, key) for expert in experts]) for experts in by_role
        )
        for name, tensor in ((_PAIR, torch.stack([gate, up], dim=2).flatten(1, 2)), (_DOWN, down)):
            shaped = tensor.unflatten(-1, (-1, _BYTES)) if key == "codes" else tensor
            tensors[layer + name + ending] = shaped
    return tensors


def _layer(name: str) -> str:
    """Return the part of a weight's name before the experts."""
    return _EXPERT.match(name)[1]


def _config(modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
    for module in modules:
        if not _EXPERT.match(module):
            raise UserError(
                f"--quantized gpt-oss holds experts alone, but the recipe quantizes {module}: "
                "leave other layers in high precision by a matcher"
            )
    whole = {_layer(module) for module in modules}
    for module in unquantized:
        expert = _EXPERT.match(module)
        if expert and expert[1] in whole:
            raise UserError(
                f"--quantized gpt-oss holds all experts of a layer or none, but the recipe keeps "
                f"{module} in high precision"
            )
    return {"quant_method": METHOD, "modules_to_not_convert": list(unquantized)}


def _stored(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    family = "block_sparse_moe" if config.get("model_type") == "mixtral" else "mlp"
    return {
        f"{layer}{family}.experts.{number}.{role}.weight": _expert(layer + name, number, rows)
        for layer in modules_with(names, f"{_PAIR}_blocks")
        for number in range(_number_of_experts(config))
        for role, (name, rows) in zip(_NAMES[family], _OUTPUTS.values(), strict=True)
    }


def _expert(name: str, number: int, rows: slice) -> Stored:
    """Describe rows of one expert in blocks (rows, K/32, 16) and scales (rows, K/32)."""

    def decode(blocks: Tensor, scales: Tensor) -> Tensor:
        return decode_blocks("mxfp4", blocks[rows].flatten(1).contiguous(), scales[rows])

    return Stored((f"{name}_blocks", f"{name}_scales"), torch.uint8, decode, number)


_FORMATS = ("mxfp4", "mxfp4-2d")
LAYOUT = Layout("gpt-oss", _FORMATS, _encode, _config, _stored, lambda names: _layer(names[0]))
