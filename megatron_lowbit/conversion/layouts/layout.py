"""Description of a layout: quantized weights in safetensors and in config.json."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.numerics import FORMATS, QuantizedTensor
from megatron_lowbit.numerics.block_format import BlockFormat

_NO_SCALE = torch.ones(())


class Stored(NamedTuple):
    """Stored form of a weight: the tensors that hold it, or one entry of their first axis.

    The first part holds its codes, in ``dtype``, and ``decode`` returns its FP32 values from the
    parts, which may be on the ``meta`` device. Without a dtype the weight is not quantized and has
    its part's.
    """

    parts: tuple[str, ...]
    dtype: torch.dtype | None
    decode: Callable[..., Tensor]
    entry: int | None = None


class ModuleFormats(NamedTuple):
    """Formats of a quantized module.

    ``input`` is that of its input where the module is served, None for high precision. One with a
    tensor scale has that scale from training's last steps.
    """

    weight: BlockFormat
    input: BlockFormat | None = None


Modules = Mapping[str, ModuleFormats]
"""Quantized modules by name."""


class Layout(NamedTuple):
    """Format of files with quantized weights.

    Attributes:
        name: the layout's name on the command line.
        formats: names of the number formats that it holds.
        encode: function from weights by name, of one or more linear layers that are stored
            together, to tensors by name. A weight is a matrix (R, K) in blocks of one row, with a
            row of scales for each of its rows; its tensors may be on the ``meta`` device.
        config: function from the quantized modules and the names of the unquantized
            linear modules to config.json's ``quantization_config``. Raises UserError where these do
            not fit.
        stored: function from the names of a folder's tensors and its config.json (with
            ``quantization_config``) to the stored form of each quantized weight. Raises UserError
            for a kind that is not read.
        group_of: function from the names of one linear layer's weights to a key that all weights
            stored together have in common.
        documents: function from the arguments of ``config`` to further JSON files by name.
        input_scale: name of the tensor that holds a module's tensor scale of inputs, and a function
            from that scale (FP32 scalar) to the tensor; None if the layout has none.
    """

    name: str
    formats: tuple[str, ...]
    encode: Callable[[Mapping[str, QuantizedTensor]], dict[str, Tensor]]
    config: Callable[[Modules, Sequence[str]], dict[str, Any]]
    stored: Callable[[Iterable[str], dict[str, Any]], dict[str, Stored]]
    group_of: Callable[[tuple[str, ...]], object] = lambda names: names
    documents: Callable[[Modules, Sequence[str]], dict[str, dict]] = lambda modules, unquantized: {}
    input_scale: tuple[str, Callable[[Tensor], Tensor]] | None = None


def one_by_one(tensors: Callable[[QuantizedTensor], dict[str, Tensor]]) -> Callable:
    """Return a :attr:`Layout.encode` that stores each module's weight by itself."""

    def encode(weights: Mapping[str, QuantizedTensor]) -> dict[str, Tensor]:
        return {
            name.removesuffix("weight") + key: tensor
            for name, weight in weights.items()
            for key, tensor in tensors(weight).items()
        }

    return encode


def modules_with(names: Iterable[str], ending: str) -> list[str]:
    """Return the modules, each with a dot at its end, that have a tensor of this name."""
    return [name.removesuffix(ending) for name in names if name.endswith(f".{ending}")]


def stored_weights(
    modules: Iterable[str], parts: Sequence[str], dtype: torch.dtype, decode: Callable[..., Tensor]
) -> dict[str, Stored]:
    """Describe the weights of modules, each of which has these parts."""
    return {
        f"{module}weight": Stored(tuple(module + part for part in parts), dtype, decode)
        for module in modules
    }


def decode_blocks(
    format: str, codes: Tensor, scales: Tensor, tensor_scale: Tensor = _NO_SCALE
) -> Tensor:
    """Decode 4-bit codes (R, K/2) or 8-bit ones (R, K), a scale a block and row, to FP32 (R, K)."""
    known = FORMATS[format]
    shape = (codes.shape[0], codes.shape[1] * (2 if known.element.bits == 4 else 1))
    scale = tensor_scale.float().view(())
    return QuantizedTensor(codes, scales, scale, known, shape).dequantize()


def reciprocal(scale: Tensor) -> Tensor:
    """Return the number whose rounded FP32 reciprocal is ``scale``."""
    rounded = 1.0 / scale
    result = rounded
    for limit in (-torch.inf, torch.inf):
        neighbour = rounded.nextafter(torch.full_like(rounded, limit))
        result = torch.where(1.0 / neighbour == scale, neighbour, result)
    return torch.where(1.0 / rounded == scale, rounded, result)
