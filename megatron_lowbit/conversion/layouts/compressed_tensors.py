"""compressed-tensors (llm-compressor, vLLM): NVFP4, MXFP4 and MXFP8, weights only.

Source: the compressors of compressed-tensors 0.20. Two E2M1 codes a byte, the even column in the
low nibble, as ``weight_packed``; ``weight_scale`` E4M3 a block of 16 (NVFP4), or E8M0 bytes a block
of 32; ``weight_global_scale``, FP32 of shape (1,), divides NVFP4's block scales: it is the
reciprocal of this project's tensor scale. MXFP8 keeps E4M3 codes in ``weight``.
"""

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
from megatron_lowbit.conversion.layouts.nvfp4_scales import reciprocal
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries
from megatron_lowbit.numerics import FORMATS, QuantizedTensor
from megatron_lowbit.numerics.block_format import BlockFormat

METHOD = "compressed-tensors"
_KINDS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized",
          "mxfp8-e4m3": "mxfp8-quantized"}  # fmt: skip
"""compressed-tensors' names of formats, by ours in blocks of one row."""
_MIXED = "mixed-precision"


def _tensors(weight: QuantizedTensor) -> dict[str, Tensor]:
    codes = "weight_packed" if weight.format.element.bits == 4 else "weight"
    tensors = {codes: weight.codes, "weight_scale": weight.scales}
    if weight.format.tensor_scaled:
        tensors["weight_global_scale"] = reciprocal(weight.tensor_scale).view(1)
    return tensors


def _config(formats: Mapping[str, BlockFormat], unquantized: Sequence[str]) -> dict[str, Any]:
    by_kind: dict[str, list[str]] = {}
    for module, format in formats.items():
        by_kind.setdefault(format.name.removesuffix("-2d"), []).append(module)
    several = len(by_kind) > 1
    groups = {
        f"group_{number}": {
            "targets": modules if several else ["Linear"],
            "format": _KINDS[kind],
            "weights": _weights(FORMATS[kind]),
        }
        for number, (kind, modules) in enumerate(by_kind.items())
    }
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": _MIXED if several else _KINDS[next(iter(by_kind))],
        "config_groups": groups,
        "ignore": list(unquantized),
    }


def _weights(format: BlockFormat) -> dict[str, Any]:
    scale = "torch.float8_e4m3fn" if format.tensor_scaled else "torch.uint8"
    return {
        "num_bits": format.element.bits,
        "type": "float",
        "strategy": "tensor_group" if format.tensor_scaled else "group",
        "group_size": format.block,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": scale,
        "zp_dtype": scale,
    }


def _stored(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    quantization = Entries(config["quantization_config"], "config.json: quantization_config")
    groups = quantization.inner("config_groups").inner_objects()
    kinds = {group.string("format", quantization.string("format", "none")) for group in groups}
    if unknown := sorted(kinds - set(_KINDS.values())):
        raise UserError(
            f"config.json: quantization_config: format {unknown[0]} is not one of "
            f"{', '.join(_KINDS.values())}"
        )
    if config["quantization_config"].get("transform_config"):
        raise UserError(
            "config.json: quantization_config: transform_config: transformed weights are not read"
        )
    # Each of the formats has other tensors.
    quantized = set(modules_with(names, "weight_scale"))
    packed = quantized.intersection(modules_with(names, "weight_packed"))
    nvfp4 = packed.intersection(modules_with(names, "weight_global_scale"))
    mxfp8_parts, mxfp4_parts = ("weight", "weight_scale"), ("weight_packed", "weight_scale")
    mxfp8, mxfp4 = bind(decode_blocks, "mxfp8-e4m3"), bind(decode_blocks, "mxfp4")
    return {
        **stored_weights(quantized - packed, mxfp8_parts, torch.float8_e4m3fn, mxfp8),
        **stored_weights(packed - nvfp4, mxfp4_parts, torch.uint8, mxfp4),
        **stored_weights(nvfp4, (*mxfp4_parts, "weight_global_scale"), torch.uint8, _decode_nvfp4),
    }


def _decode_nvfp4(codes: Tensor, scales: Tensor, divisor: Tensor) -> Tensor:
    return decode_blocks("nvfp4", codes, scales, 1.0 / divisor.float())


_FORMATS = tuple(name + suffix for name in _KINDS for suffix in ("", "-2d"))
LAYOUT = Layout(METHOD, _FORMATS, one_by_one(_tensors), _config, _stored)
