"""DeepSeek-V3's FP8: ``weight`` in E4M3, an FP32 scale a 128x128 tile in ``weight_scale_inv``.

Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and config.json. A weight is code times
``weight_scale_inv``, which is this project's decode scale as it is. A last tile may be ragged.
"""

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.conversion.layouts.layout import (
    Layout,
    Modules,
    Stored,
    modules_with,
    one_by_one,
    stored_weights,
)
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import QuantizedTensor
from megatron_lowbit.numerics.block_formats.fp8 import TILE

METHOD = "fp8"
_LARGEST = 2**10


def _tensors(weight: QuantizedTensor) -> dict[str, Tensor]:
    columns = weight.shape[1]
    return {
        "weight": weight.codes[:, :columns].contiguous(),
        # The rows of a tile have the same scales: who splits a weight has made sure of it.
        "weight_scale_inv": weight.scales[::TILE].contiguous(),
    }


def _config(modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "fmt": "e4m3",
        "weight_block_size": [TILE, TILE],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(unquantized),
    }


def _stored(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    tile = config["quantization_config"].get("weight_block_size")
    good = isinstance(tile, list) and all(type(n) is int and 0 < n <= _LARGEST for n in tile)
    if not (good and len(tile) == 2):
        raise UserError(
            f"config.json: quantization_config: weight_block_size {reprlib.repr(tile)}: FP8 "
            f"weights are read in blocks of up to {_LARGEST}, such as [{TILE}, {TILE}]"
        )

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        rows, columns = codes.shape
        wide = scales.float().repeat_interleave(tile[1], dim=1)[:, :columns]
        return codes.to(torch.float32) * wide.repeat_interleave(tile[0], dim=0)[:rows]

    modules = modules_with(names, "weight_scale_inv")
    return stored_weights(modules, ("weight", "weight_scale_inv"), torch.float8_e4m3fn, decode)


LAYOUT = Layout("fp8-blocks", ("fp8-128x128-e4m3",), one_by_one(_tensors), _config, _stored)
