"""gpt-oss's MXFP4: the experts of a layer in one tensor of ``_blocks`` and one of ``_scales``.

Source: openai/gpt-oss, and transformers' reader of it. E experts of ``experts.gate_up_proj`` and of
``experts.down_proj``: ``_blocks`` are bytes (E, rows, K/32, 16), two E2M1 codes a byte, the even
column in the low nibble; ``_scales`` E8M0 bytes (E, rows, K/32). The rows of gate and up alternate,
gate first. Only experts are quantized. Other models' experts are stored so, too, which their own
readers do not know.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.conversion.layouts.layout import (
    Layout,
    Modules,
    Stored,
    decode_blocks,
    modules_with,
)
from megatron_lowbit.conversion.layouts.stacked_experts import (
    DOWN,
    OUTPUTS,
    PAIR,
    number_of_experts,
)
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import QuantizedTensor

METHOD = "mxfp4"
_NAMES = {"block_sparse_moe": ("w1", "w3", "w2"), "mlp": tuple(OUTPUTS)}
"""Names of gate, up and down by the name of a layer of experts."""
_EXPERT = re.compile(r"(.+\.)(block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)")
_BYTES = 16
"""Bytes of a block of 32 codes."""


def _encode(weights: Mapping[str, QuantizedTensor]) -> dict[str, Tensor]:
    """Return a layer's tensors, of all its experts' gate, up and down."""
    by_role: list[list[QuantizedTensor]] = [[], [], []]
    for name, weight in weights.items():
        _, family, _, role = _EXPERT.match(name).groups()
        by_role[_NAMES[family].index(role)].append(weight)
    layer = _layer(next(iter(weights)))
    tensors = {}
    for key, ending in (("codes", "_blocks"), ("scales", "_scales")):
        gate, up, down = (
            torch.stack([getattr(expert, key) for expert in experts]) for experts in by_role
        )
        for name, tensor in ((PAIR, torch.stack([gate, up], dim=2).flatten(1, 2)), (DOWN, down)):
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
        for layer in modules_with(names, f"{PAIR}_blocks")
        for number in range(number_of_experts(config))
        for role, (name, rows) in zip(_NAMES[family], OUTPUTS.values(), strict=True)
    }


def _expert(name: str, number: int, rows: slice) -> Stored:
    """Describe rows of one expert in blocks (rows, K/32, 16) and scales (rows, K/32)."""

    def decode(blocks: Tensor, scales: Tensor) -> Tensor:
        return decode_blocks("mxfp4", blocks[rows].flatten(1).contiguous(), scales[rows])

    return Stored((f"{name}_blocks", f"{name}_scales"), torch.uint8, decode, number)


_FORMATS = ("mxfp4", "mxfp4-2d")
LAYOUT = Layout("gpt-oss", _FORMATS, _encode, _config, _stored, lambda names: _layer(names[0]))
