"""Layouts that store each module's weight by itself: fp8-blocks, compressed-tensors and modelopt.

In all of them 4-bit codes are two in a byte, the even column in the low nibble.

fp8-blocks is DeepSeek-V3's FP8: ``weight`` in E4M3, an FP32 scale per 128x128 tile in
``weight_scale_inv``, which is this project's decode scale as it is. A last tile may be ragged.
Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and config.json.

compressed-tensors (llm-compressor, vLLM) has one form per number format. NVFP4's
``weight_global_scale``, FP32 (1,), divides its block scales: it is the reciprocal of this project's
tensor scale. INT4 (``pack-quantized``) has eight codes in an int32, the first column lowest, and
the matrix's size in ``weight_shape``. Inputs are declared where one of its presets has both
formats: readers then compute their scales, except NVFP4's tensor scale, whose reciprocal is
``input_global_scale``. Source: the compressors of compressed-tensors 0.20.

modelopt is NVIDIA Model Optimizer's unified checkpoint: ``W4A16_NVFP4``, or ``NVFP4`` with inputs
quantized by an ``input_scale``; ``weight_scale_2`` is the FP32 tensor scale. Source: ModelOpt's
``modelopt.torch.export`` and ``NVFP4QTensor``.
"""

import reprlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial as bind
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.conversion.layouts.layout import (
    PLACE,
    Layout,
    Modules,
    Stored,
    decode_blocks,
    modules_with,
    stored_weights,
)
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries
from megatron_lowbit.numerics import FORMATS, QuantizedTensor
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import TILE
from megatron_lowbit.numerics.block_formats.int4 import LOWEST
from megatron_lowbit.numerics.formats import unpack_nibbles

_LARGEST_TILE = 2**10


def _encode_fp8(weight: QuantizedTensor) -> dict[str, Tensor]:
    return {
        "weight": weight.codes[:, : weight.shape[1]].contiguous(),
        # The rows of a tile have the same scales: who splits a weight has made sure of it.
        "weight_scale_inv": weight.scales[::TILE].contiguous(),
    }


def _fp8_config(modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [TILE, TILE],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(unquantized),
    }


def _stored_fp8(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    tile = config["quantization_config"].get("weight_block_size")
    good = isinstance(tile, list) and all(type(n) is int and 0 < n <= _LARGEST_TILE for n in tile)
    if not (good and len(tile) == 2):
        raise UserError(
            f"{PLACE}: weight_block_size {reprlib.repr(tile)}: FP8 weights are read in blocks of "
            f"up to {_LARGEST_TILE}, such as [{TILE}, {TILE}]"
        )

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        rows, columns = codes.shape
        wide = scales.float().repeat_interleave(tile[1], dim=1)[:, :columns]
        return codes.to(torch.float32) * wide.repeat_interleave(tile[0], dim=0)[:rows]

    modules = modules_with(names, "weight_scale_inv")
    return stored_weights(modules, ("weight", "weight_scale_inv"), torch.float8_e4m3fn, decode)


FP8_BLOCKS = Layout(
    "fp8-blocks", "fp8", ("fp8-128x128-e4m3",), _encode_fp8, _fp8_config, _stored_fp8
)


def _decode_nvfp4(codes: Tensor, scales: Tensor, divisor: Tensor) -> Tensor:
    return decode_blocks("nvfp4", codes, scales, 1.0 / divisor.float())


def _decode_int4(packed: Tensor, scales: Tensor, shape: Tensor) -> Tensor:
    """Decode int32 words (R, K/8), with a scale for each of K/G groups of any length G."""
    steps = unpack_nibbles(packed.view(torch.uint8)).to(torch.float32) + LOWEST
    groups = steps.view(len(scales), scales.shape[1], -1)
    return (groups * scales.float().unsqueeze(-1)).flatten(1)


class _Form(NamedTuple):
    """Form of a number format in compressed-tensors.

    ``parts`` are a module's tensors: codes in ``dtype``, block scales, and a third that is the
    tensor scale or the size. ``input`` is the format of inputs that is declared with it.
    """

    name: str
    parts: tuple[str, ...]
    dtype: torch.dtype
    decode: Callable[..., Tensor]
    input: str


_PACKED = ("weight_packed", "weight_scale")
_INT4 = _Form("pack-quantized", (*_PACKED, "weight_shape"), torch.int32, _decode_int4,
              "fp8-row-e4m3")  # fmt: skip
_FORMS = {
    "nvfp4": _Form("nvfp4-pack-quantized", (*_PACKED, "weight_global_scale"), torch.uint8,
                   _decode_nvfp4, "nvfp4"),
    "mxfp4": _Form("mxfp4-pack-quantized", _PACKED, torch.uint8, bind(decode_blocks, "mxfp4"),
                   "mxfp4"),
    "mxfp8-e4m3": _Form("mxfp8-quantized", ("weight", "weight_scale"), torch.float8_e4m3fn,
                        bind(decode_blocks, "mxfp8-e4m3"), "mxfp8-e4m3"),
    "int4-1x32": _INT4,
    "int4-1x128": _INT4,
}  # fmt: skip
"""Forms by our formats in blocks of one row."""


def _row_format(format: BlockFormat) -> str:
    return format.name.removesuffix("-2d")


def _encode_compressed(weight: QuantizedTensor) -> dict[str, Tensor]:
    form, format = _FORMS[_row_format(weight.format)], weight.format
    tensors = [weight.codes.view(form.dtype), weight.scales]
    if format.tensor_scaled:
        tensors.append(reciprocal(weight.tensor_scale).view(1))
    elif form is _INT4:
        tensors.append(torch.tensor(weight.shape, device=weight.codes.device))
    return dict(zip(form.parts, tensors, strict=True))


def _compressed_config(modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
    by_format: dict[tuple[str, bool], list[str]] = {}
    for name, weight in modules.items():
        format, given = _row_format(weight.format), weight.input
        preset = FORMATS[_FORMS[format].input]
        with_input = given is not None and (given.name, given.block) == (preset.name, preset.block)
        by_format.setdefault((format, with_input), []).append(name)
    groups = {}
    for number, ((format, with_input), names) in enumerate(by_format.items()):
        form = _FORMS[format]
        input = FORMATS[form.input]
        # Of the scales of NVFP4's inputs readers compute only those of blocks.
        dynamic = "local" if input.tensor_scaled else True
        groups[f"group_{number}"] = {
            "targets": names if len(by_format) > 1 else ["Linear"],
            "format": form.name,
            "weights": _scheme(FORMATS[format], False),
            "input_activations": _scheme(input, dynamic) if with_input else None,
        }
    form_names = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form_names.pop() if len(form_names) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(unquantized),
    }


def _scheme(format: BlockFormat, dynamic: bool | str) -> dict[str, Any]:
    is_integer = format.element.name == "int4"
    scheme = {"num_bits": format.element.bits, "type": "int" if is_integer else "float"}
    if format.row_scaled:
        token = {"strategy": "token", "symmetric": True, "dynamic": dynamic, "observer": None}
        return scheme | token
    scheme |= {
        "strategy": "tensor_group" if format.tensor_scaled else "group",
        "group_size": format.block,
        "symmetric": True,
        "dynamic": dynamic,
    }
    if not is_integer:
        scale = "torch.float8_e4m3fn" if format.tensor_scaled else "torch.uint8"
        scheme |= {"scale_dtype": scale, "zp_dtype": scale}
    return scheme


def _stored_compressed(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    quantization = Entries(config["quantization_config"], PLACE)
    groups = quantization.inner("config_groups").inner_objects()
    default = quantization.string("format", "none")
    form_names = [group.string("format", default) for group in groups]
    known = [form.name for form in _FORMS.values()]
    if unknown := sorted({*form_names} - {*known}):
        raise UserError(f"{PLACE}: format {unknown[0]} is not one of {', '.join(known)}")
    message = f"{PLACE}: transform_config: transformed weights are not read"
    require(not config["quantization_config"].get("transform_config"), message)
    for name, group in zip(form_names, groups, strict=True):
        bits = group.inner("weights").integer("num_bits", 4, 1, 16)
        message = f"{PLACE}: {name} weights of {bits} bits are not read, weights of 4 are"
        require(name != _INT4.name or bits == 4, message)
    names = set(names)
    weights: dict[str, Stored] = {}
    for module in modules_with(names, "weight_scale"):
        present = (k for k in _FORMS.values() if all(module + part in names for part in k.parts))
        # The parts of some forms are among those of others.
        form = max(present, key=lambda form: len(form.parts), default=_FORMS["mxfp8-e4m3"])
        weights |= stored_weights([module], form.parts, form.dtype, form.decode)
    return weights


def reciprocal(scale: Tensor) -> Tensor:
    """Return the number whose rounded FP32 reciprocal is ``scale``."""
    rounded = 1.0 / scale
    result = rounded
    for limit in (-torch.inf, torch.inf):
        neighbour = rounded.nextafter(torch.full_like(rounded, limit))
        result = torch.where(1.0 / neighbour == scale, neighbour, result)
    return torch.where(1.0 / rounded == scale, rounded, result)


COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "compressed-tensors",
    [name for form in _FORMS for name in (form, f"{form}-2d") if name in FORMATS],
    _encode_compressed, _compressed_config, _stored_compressed,
    input_scale=("input_global_scale", lambda scale: reciprocal(scale).view(1)),
)  # fmt: skip

DOCUMENT = "hf_quant_config.json"
_WEIGHTS, _BOTH = "W4A16_NVFP4", "NVFP4"
_NVFP4_PARTS = ("weight", "weight_scale", "weight_scale_2")


def _encode_modelopt(weight: QuantizedTensor) -> dict[str, Tensor]:
    return dict(zip(_NVFP4_PARTS, (weight.codes, weight.scales, weight.tensor_scale), strict=True))


def _modelopt_config(modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
    with_input = [weight.input and weight.input.name == "nvfp4" for weight in modules.values()]
    if any(with_input) and not all(with_input):
        raise UserError(
            f"--quantized modelopt quantizes the inputs of all modules or of none, but the recipe "
            f"quantizes the inputs of {with_input.count(True)} of {len(with_input)}"
        )
    block = FORMATS["nvfp4"].block
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": block}
    group: dict[str, Any] = {"weights": scheme, "targets": ["Linear"]}
    if all(with_input):
        group["input_activations"] = scheme
    return {
        "quant_method": "modelopt",
        "quant_algo": _BOTH if all(with_input) else _WEIGHTS,
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
        "producer": {"name": "modelopt", "version": "megatron-lowbit"},  # Readers need the name.
    }


def _modelopt_documents(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": FORMATS["nvfp4"].block,
        "exclude_modules": config["ignore"],
    }
    return {DOCUMENT: {"producer": config["producer"], "quantization": quantization}}


def _stored_modelopt(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
    algorithm = config["quantization_config"].get("quant_algo")
    shown = reprlib.repr(algorithm)
    message = f"{PLACE}: quant_algo {shown} is not one of {_BOTH}, {_WEIGHTS}"
    require(algorithm in (_BOTH, _WEIGHTS), message)
    modules = modules_with(names, "weight_scale_2")
    return stored_weights(modules, _NVFP4_PARTS, torch.uint8, bind(decode_blocks, "nvfp4"))


MODELOPT = Layout(
    "modelopt", "modelopt", ("nvfp4", "nvfp4-2d"), _encode_modelopt, _modelopt_config,
    _stored_modelopt, _modelopt_documents, input_scale=("input_scale", lambda scale: scale),
)  # fmt: skip
