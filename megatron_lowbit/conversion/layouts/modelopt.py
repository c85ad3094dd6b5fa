"""NVIDIA Model Optimizer's unified checkpoints: ``W4A16_NVFP4``, or ``NVFP4`` with inputs.

Source: ModelOpt's ``modelopt.torch.export`` and ``NVFP4QTensor``. ``weight`` holds two E2M1 codes
per byte, the even column in the low nibble; ``weight_scale`` an E4M3 scale per block of 16;
``weight_scale_2`` the FP32 tensor scale. ``NVFP4`` also quantizes inputs by an ``input_scale``.
"""

import reprlib
from collections.abc import Iterable, Sequence
from functools import partial as bind
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.conversion.layouts.layout import (
    Layout,
    Modules,
    Stored,
    decode_blocks,
    modules_with,
    one_by_one,
    stored_weights,
)
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import FORMATS, QuantizedTensor

METHOD = "modelopt"
DOCUMENT = "hf_quant_config.json"
_WEIGHTS, _BOTH = "W4A16_NVFP4", "NVFP4"
_PRODUCER = {"name": METHOD, "version": "megatron-lowbit"}
"""Readers look for the name."""


def _tensors(weight: QuantizedTensor) -> dict[str, Tensor]:
    return {
        "weight": weight.codes,
        "weight_scale": weight.scales,
        "weight_scale_2": weight.tensor_scale,
    }


def _algorithm(modules: Modules) -> str:
    kinds = (module.input.name if module.input else None for module in modules.values())
    with_input = [kind == "nvfp4" for kind in kinds]
    if any(with_input) and not all(with_input):
        raise UserError(
            f"--quantized modelopt quantizes the inputs of all modules or of none, but the recipe "
            f"those of {sum(with_input)} of {len(with_input)}"
        )
    return _BOTH if all(with_input) else _WEIGHTS


def _config(modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
    block, algorithm = FORMATS["nvfp4"].block, _algorithm(modules)
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": block}
    group: dict[str, Any] = {"weights": scheme, "targets": ["Linear"]}
    if algorithm == _BOTH:
        group["input_activations"] = scheme
    return {
        "quant_method": METHOD,
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
        "producer": _PRODUCER,
    }


def _documents(modules: Modules, unquantized: Sequence[str]) -> dict[str, dict]:
    quantization = {
        "quant_algo": _algorithm(modules),
        "kv_cache_quant_algo": None,
        "group_size": FORMATS["nvfp4"].block,
        "exclude_modules": list(unquantized),
    }
    return {DOCUMENT: {"producer": _PRODUCER, "quantization": quantization}}


def _stored(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    algorithm = config["quantization_config"].get("quant_algo")
    if algorithm not in (_BOTH, _WEIGHTS):
        raise UserError(
            f"config.json: quantization_config: quant_algo {reprlib.repr(algorithm)} is not one of "
            f"{_BOTH}, {_WEIGHTS}"
        )

    modules = modules_with(names, "weight_scale_2")
    parts = ("weight", "weight_scale", "weight_scale_2")
    return stored_weights(modules, parts, torch.uint8, bind(decode_blocks, "nvfp4"))


_FORMATS = ("nvfp4", "nvfp4-2d")
LAYOUT = Layout(
    METHOD, _FORMATS, one_by_one(_tensors), _config, _stored,
    documents=_documents, input_scale=("input_scale", lambda scale: scale),
)  # fmt: skip
