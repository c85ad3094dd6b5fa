"""compressed-tensors (llm-compressor, vLLM): NVFP4, MXFP4, MXFP8 and INT4 in groups.

Source: the compressors of compressed-tensors 0.20. Two E2M1 codes a byte, the even column in the
low nibble, as ``weight_packed``; ``weight_scale`` E4M3 a block of 16 (NVFP4), or E8M0 bytes a block
of 32; ``weight_global_scale``, FP32 of shape (1,), divides NVFP4's block scales: it is the
reciprocal of this project's tensor scale. MXFP8 keeps E4M3 codes in ``weight``. INT4
(``pack-quantized``) has eight codes an int32 in ``weight_packed``, the first column lowest,
``weight_scale`` BF16 a group, and the matrix's size in ``weight_shape``.

Inputs are declared where a preset of compressed-tensors has both formats: readers then scale them
anew, but for NVFP4's tensor scale, whose reciprocal is ``input_global_scale``.
"""

from collections.abc import Iterable, Sequence
from functools import partial as bind
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.conversion.layouts.layout import (
    Layout,
    ModuleFormats,
    Modules,
    Stored,
    decode_blocks,
    modules_with,
    one_by_one,
    reciprocal,
    stored_weights,
)
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries
from megatron_lowbit.numerics import FORMATS, QuantizedTensor
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.int4 import LOWEST
from megatron_lowbit.numerics.formats import unpack_nibbles

METHOD = "compressed-tensors"
_PACKED = "pack-quantized"
_KINDS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized",
          "mxfp8-e4m3": "mxfp8-quantized",
          "int4-1x32": _PACKED, "int4-1x128": _PACKED}  # fmt: skip
"""compressed-tensors' names of formats, by ours in blocks of one row."""
_INPUTS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8-e4m3": "mxfp8-e4m3",
           "int4-1x32": "fp8-row-e4m3", "int4-1x128": "fp8-row-e4m3"}  # fmt: skip
"""Format of inputs that is declared beside one of weights, as in its presets."""
_MIXED = "mixed-precision"


def _is_int4(format: BlockFormat) -> bool:
    return format.element.name == "int4"


def _tensors(weight: QuantizedTensor) -> dict[str, Tensor]:
    codes, format = weight.codes, weight.format
    if _is_int4(format):
        shape = torch.tensor(weight.shape, device=codes.device)
        packed = codes.view(torch.int32)
        return {"weight_packed": packed, "weight_scale": weight.scales, "weight_shape": shape}
    key = "weight_packed" if format.element.bits == 4 else "weight"
    tensors = {key: codes, "weight_scale": weight.scales}
    if format.tensor_scaled:
        tensors["weight_global_scale"] = reciprocal(weight.tensor_scale).view(1)
    return tensors


def _config(modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
    by_kind: dict[tuple[str, bool], list[str]] = {}
    for name, formats in modules.items():
        kind = formats.weight.name.removesuffix("-2d")
        by_kind.setdefault((kind, _declares_input(formats)), []).append(name)
    several = len(by_kind) > 1
    groups = {
        f"group_{number}": {
            "targets": names if several else ["Linear"],
            "format": _KINDS[kind],
            "weights": _scheme(FORMATS[kind], dynamic=False),
            "input_activations": _input_scheme(FORMATS[_INPUTS[kind]]) if with_input else None,
        }
        for number, ((kind, with_input), names) in enumerate(by_kind.items())
    }
    kinds = list(dict.fromkeys(_KINDS[kind] for kind, _ in by_kind))
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": _MIXED if len(kinds) > 1 else kinds[0],
        "config_groups": groups,
        "ignore": list(unquantized),
    }


def _declares_input(formats: ModuleFormats) -> bool:
    """Return True for inputs in the format that a preset has beside the weights'."""
    expected = FORMATS[_INPUTS[formats.weight.name.removesuffix("-2d")]]
    given = formats.input
    return given is not None and (given.name, given.block) == (expected.name, expected.block)


def _scheme(format: BlockFormat, dynamic: bool | str) -> dict[str, Any]:
    scheme = {
        "num_bits": format.element.bits,
        "type": "int" if _is_int4(format) else "float",
        "strategy": "tensor_group" if format.tensor_scaled else "group",
        "group_size": format.block,
        "symmetric": True,
        "dynamic": dynamic,
    }
    if not _is_int4(format):
        scale = "torch.float8_e4m3fn" if format.tensor_scaled else "torch.uint8"
        scheme |= {"scale_dtype": scale, "zp_dtype": scale}
    return scheme


def _input_scheme(format: BlockFormat) -> dict[str, Any]:
    """Return the scheme of inputs: of NVFP4's scales only those of blocks are made anew."""
    if format.row_scaled:
        bits = format.element.bits
        token = {"strategy": "token", "symmetric": True, "dynamic": True, "observer": None}
        return {"num_bits": bits, "type": "float"} | token
    return _scheme(format, dynamic="local" if format.tensor_scaled else True)


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
    for group in groups:
        weights = group.inner("weights")
        bits = weights.integer("num_bits", 4, 1, 16)
        if group.string("format", quantization.string("format", "none")) == _PACKED and bits != 4:
            raise UserError(
                f"config.json: quantization_config: {_PACKED} weights of {bits} bits are not read, "
                "those of 4 are"
            )
    # Each of the formats has other tensors.
    quantized = set(modules_with(names, "weight_scale"))
    packed = quantized.intersection(modules_with(names, "weight_packed"))
    nvfp4 = packed.intersection(modules_with(names, "weight_global_scale"))
    int4 = packed.intersection(modules_with(names, "weight_shape"))
    mxfp8_parts, mxfp4_parts = ("weight", "weight_scale"), ("weight_packed", "weight_scale")
    mxfp8, mxfp4 = bind(decode_blocks, "mxfp8-e4m3"), bind(decode_blocks, "mxfp4")
    return {
        **stored_weights(quantized - packed, mxfp8_parts, torch.float8_e4m3fn, mxfp8),
        **stored_weights(packed - nvfp4 - int4, mxfp4_parts, torch.uint8, mxfp4),
        **stored_weights(int4, (*mxfp4_parts, "weight_shape"), torch.int32, _decode_int4),
        **stored_weights(nvfp4, (*mxfp4_parts, "weight_global_scale"), torch.uint8, _decode_nvfp4),
    }


def _decode_nvfp4(codes: Tensor, scales: Tensor, divisor: Tensor) -> Tensor:
    return decode_blocks("nvfp4", codes, scales, 1.0 / divisor.float())


def _decode_int4(packed: Tensor, scales: Tensor, shape: Tensor) -> Tensor:
    """Decode int32 words (R, K/8), with a scale for each of K/G groups of any length G."""
    steps = unpack_nibbles(packed.view(torch.uint8)).to(torch.float32) + LOWEST
    groups = steps.view(len(scales), scales.shape[1], -1)
    return (groups * scales.float().unsqueeze(-1)).flatten(1)


_FORMATS = tuple(name for kind in _KINDS for name in (kind, f"{kind}-2d") if name in FORMATS)
LAYOUT = Layout(
    METHOD, _FORMATS, one_by_one(_tensors), _config, _stored,
    input_scale=("input_global_scale", lambda scale: reciprocal(scale).view(1)),
)  # fmt: skip
