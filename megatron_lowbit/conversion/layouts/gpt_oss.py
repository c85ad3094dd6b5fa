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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial as bind
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

_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stored tensors, and the linear layers of each expert whose outputs alternate in them."""
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACK_OF = {
    name: stack
    for stack, roles in _STACKS.items()
    for role in roles
    for name in (role, _MIXTRAL[role])
}
_ENDINGS = {"weight": "", "bias": "_bias", "weight_blocks": "_blocks", "weight_scales": "_scales"}
"""Ends of the names of stored tensors, by the ends of the names of one expert's tensors."""
_EXPERT = re.compile(r"(.+\.)(block_sparse_moe|mlp)\.experts\.\d+\.(\w+)(?:\.(\w+))?")
_MODEL_TYPES = ("gpt_oss",)


def stored_experts(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Describe each expert's weights and biases in a folder's tensors; {} for other models."""
    if config.get("model_type") not in _MODEL_TYPES:
        return {}
    names = list(names)
    weights = _stored(names, config, "weight", ("",), None, _decode_plain)
    return weights | _stored(names, config, "bias", ("_bias",), None, _decode_plain)


def _stored(
    names: Sequence[str],
    config: Mapping[str, Any],
    key: str,
    endings: Sequence[str],
    dtype: torch.dtype | None,
    decode: Callable[..., Tensor],
) -> dict[str, Stored]:
    """Describe ``key`` of each expert in the tensors with these endings.

    ``decode`` gets a slice of outputs, and the entry of one expert in each tensor.
    """
    entries, experts, stored = Entries(config, "config.json"), 0, {}
    for count in ("n_routed_experts", "num_experts", "num_local_experts"):
        experts = entries.integer(count, experts, minimum=0, maximum=2**10)
    is_mixtral = config.get("model_type") == "mixtral"
    block = "block_sparse_moe" if is_mixtral else "mlp"
    for stack, roles in _STACKS.items():
        for layer in modules_with(names, f"mlp.experts.{stack}{endings[0]}"):
            parts = tuple(f"{layer}mlp.experts.{stack}{ending}" for ending in endings)
            for first, role in enumerate(roles):
                expert = f"{_MIXTRAL[role] if is_mixtral else role}.{key}"
                decode_role = bind(decode, slice(first, None, len(roles)))
                for number in range(experts):
                    name = f"{layer}{block}.experts.{number}.{expert}"
                    stored[name] = Stored(parts, dtype, decode_role, number)
    return stored


def _decode_plain(outputs: slice, expert: Tensor) -> Tensor:
    """Return outputs of a weight (in, out), as (out, in), or of a bias (out)."""
    chosen = expert[..., outputs]
    return chosen.t() if chosen.ndim == 2 else chosen


def _decode_mxfp4(outputs: slice, blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode outputs of blocks (out, in/32, 16) and scales (out, in/32)."""
    return decode_blocks("mxfp4", blocks[outputs].flatten(1).contiguous(), scales[outputs])


def check_experts(quantized: Iterable[str], config: Mapping[str, Any], layout: str) -> None:
    """Raise UserError for experts among ``quantized`` weights that no reader takes one by one."""
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
    """Return a model's tensors with each layer's experts in those that Hugging Face stores.

    These are all experts of a gpt-oss, and those in MXFP4 of other models.
    """
    is_gpt_oss = config.get("model_type") in _MODEL_TYPES
    groups: dict[str, list[LazyTensors]] = {}
    for content in contents:
        name = next(iter(content.outline))
        expert = _EXPERT.fullmatch(name)
        if expert and (expert[4] == "weight_blocks" or (is_gpt_oss and expert[4] in _ENDINGS)):
            name = _stack_name(expert)
        groups.setdefault(name, []).append(content)
    return [
        members[0] if name in members[0].outline else _stacked(members)
        for name, members in groups.items()
    ]


def _stack_name(expert: re.Match[str]) -> str:
    """Return the tensor in which a tensor of one expert is stored."""
    layer, _, role, key = expert.groups()
    return f"{layer}mlp.experts.{_STACK_OF[role]}{_ENDINGS[key]}"


def _stacked(experts: Sequence[LazyTensors]) -> LazyTensors:
    """Return the tensors of a layer's experts, in their order."""

    def stack(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        by_name: dict[str, dict[str, list[Tensor]]] = {}
        for part in parts:
            for name, tensor in part.items():
                expert = _EXPERT.fullmatch(name)
                assert expert is not None
                roles = by_name.setdefault(_stack_name(expert), {})
                roles.setdefault(expert[3], []).append(tensor)
        stacked = {}
        for name, roles in by_name.items():
            columns = [torch.stack(roles[role]) for role in _STACK_OF if role in roles]
            joined = torch.stack(columns, dim=2).flatten(1, 2)
            is_weight = name.endswith(tuple(_STACKS))
            stacked[name] = joined.transpose(1, 2) if is_weight else joined
        return stacked

    outline = stack(expert.outline for expert in experts)
    return LazyTensors(outline, lambda: stack(expert.make() for expert in experts))


def _encode(weight: QuantizedTensor) -> dict[str, Tensor]:
    blocks = weight.codes.unflatten(-1, (-1, 16))  # bytes of 32 codes
    return {"weight_blocks": blocks, "weight_scales": weight.scales}


def _config(modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
    quantized_layers = set()
    for module in modules:
        expert = _EXPERT.match(module)
        if not expert:
            raise UserError(
                f"--quantized gpt-oss holds experts alone, but the recipe quantizes {module}: "
                "leave other layers in high precision by a matcher"
            )
        quantized_layers.add(expert[1])
    for module in unquantized:
        expert = _EXPERT.match(module)
        if expert and expert[1] in quantized_layers:
            raise UserError(
                f"--quantized gpt-oss holds all experts of a layer or none, but the recipe keeps "
                f"{module} in high precision"
            )
    return {"quant_method": GPT_OSS.method, "modules_to_not_convert": list(unquantized)}


def _stored_mxfp4(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    endings = ("_blocks", "_scales")
    return _stored([*names], config, "weight", endings, torch.uint8, _decode_mxfp4)


GPT_OSS = Layout("gpt-oss", "mxfp4", ("mxfp4", "mxfp4-2d"), _encode, _config, _stored_mxfp4)
