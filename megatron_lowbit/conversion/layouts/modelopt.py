"""NVIDIA Model Optimizer's unified checkpoints: NVFP4, weights only (``W4A16_NVFP4``).

Source: ModelOpt's ``modelopt.torch.export`` and ``NVFP4QTensor``. ``weight`` holds two E2M1 codes a
byte, the even column in the low nibble; ``weight_scale`` E4M3 scales a block of 16;
``weight_scale_2`` this project's FP32 tensor scale as it is. ``NVFP4`` also quantizes activations,
by an ``input_scale`` from calibration that training does not have: it is read, not written.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial as bind
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.conversion.layouts.layout import (
    Layout,
    Stored,
    decode_blocks,
    modules_with,
    one_by_one,
    stored_weights,
)
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import FORMATS, QuantizedTensor
from megatron_lowbit.numerics.block_format import BlockFormat

METHOD = "modelopt"
DOCUMENT = "hf_quant_config.json"
_WRITTEN = "W4A16_NVFP4"
_READ = ("NVFP4", _WRITTEN)
_PRODUCER = {"name": METHOD, "version": "megatron-lowbit"}
"""Readers look for the name."""


def _tensors(weight: QuantizedTensor) -> dict[str, Tensor]:
    return {
        "weight": weight.codes,
        "weight_scale": weight.scales,
        "weight_scale_2": weight.tensor_scale,
    }


def _config(formats: Mapping[str, BlockFormat], unquantized: Sequence[str]) -> dict[str, Any]:
    block = FORMATS["nvfp4"].block
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": block}
    return {
        "quant_method": METHOD,
        "quant_algo": _WRITTEN,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": list(unquantized),
        "producer": _PRODUCER,
    }


def _documents(formats: Mapping[str, BlockFormat], unquantized: Sequence[str]) -> dict[str, dict]:
    quantization = {
        "quant_algo": _WRITTEN,
        "kv_cache_quant_algo": None,
        "group_size": FORMATS["nvfp4"].block,
        "exclude_modules": list(unquantized),
    }
    return {DOCUMENT: {"producer": _PRODUCER, "quantization": quantization}}


def _stored(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    algorithm = config["quantization_config"].get("quant_algo")
    if algorithm not in _READ:
        raise UserError(
            f"config.json: quantization_config: quant_algo {reprlib.repr(algorithm)} is not one of "
            f"{', '.join(_READ)}"
        )

    modules = modules_with(names, "weight_scale_2")
    parts = ("weight", "weight_scale", "weight_scale_2")
    return stored_weights(modules, parts, torch.uint8, bind(decode_blocks, "nvfp4"))


_FORMATS = ("nvfp4", "nvfp4-2d")
LAYOUT = Layout(METHOD, _FORMATS, one_by_one(_tensors), _config, _stored, documents=_documents)
