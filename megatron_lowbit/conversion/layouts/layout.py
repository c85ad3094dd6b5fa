"""Description of a layout: quantized weights in safetensors and in config.json."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import write_json
from megatron_lowbit.conversion.mapping import Rule
from megatron_lowbit.numerics import FORMATS, DelayedAmax, QuantizedTensor, Quantizer
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.recipes import Layer

PLACE = "config.json: quantization_config"
_NO_SCALE = torch.ones(())
_PIECE = 2**18
"""Elements to quantize or decode at a time: temporary tensors then fit into caches."""


class Weight(NamedTuple):
    """Weight (R, K) of a linear layer that is quantized, and the rule of its tensors.

    Attributes:
        amax: of training's last steps, or of the weights that share the tensor scale (FP32
            scalar); None for the weight's own.
        input: format of the layer's input where it is served; None for high precision.
        input_scale: its tensor scale of training's last steps, FP32 scalar.
    """

    layer: Layer
    quantizer: Quantizer
    rule: Rule
    amax: Tensor | DelayedAmax | None
    input: BlockFormat | None
    input_scale: Tensor | None

    @property
    def format(self) -> BlockFormat:
        """Format of its blocks."""
        return self.quantizer.format


Modules = Mapping[str, Weight]
"""Quantized weights by the names of Hugging Face's modules that they are in."""


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


class Layout(NamedTuple):
    """Format of files with quantized weights.

    Attributes:
        name: the layout's name on the command line.
        method: its ``quant_method`` in config.json.
        formats: names of the number formats that it holds.
        encode: function from a weight to its tensors, by the ends of their names. A weight is a
            matrix (R, K) in blocks of one row, with a row of scales for each of its rows; its
            tensors may be on the ``meta`` device.
        config: function from the quantized modules and the names of the unquantized linear modules
            to config.json's ``quantization_config``. Raises UserError where these do not fit.
        stored: function from the names of a folder's tensors and its config.json (with
            ``quantization_config``) to the stored form of each quantized weight. Raises UserError
            for a kind that is not read.
        documents: function from ``quantization_config`` to further JSON files by name.
        input_scale: name of the tensor that holds a module's tensor scale of inputs, and a function
            from that scale (FP32 scalar) to the tensor; None if the layout has none.
    """

    name: str
    method: str
    formats: Sequence[str]
    encode: Callable[[QuantizedTensor], dict[str, Tensor]]
    config: Callable[[Modules, Sequence[str]], dict[str, Any]]
    stored: Callable[[Iterable[str], dict[str, Any]], dict[str, Stored]]
    documents: Callable[[dict[str, Any]], dict[str, dict[str, Any]]] = lambda config: {}
    input_scale: tuple[str, Callable[[Tensor], Tensor]] | None = None


def write_documents(folder: Path, layout: Layout, config: dict[str, Any]) -> None:
    """Write the JSON files of a layout besides config.json; ``config``: quantization_config."""
    for name, document in layout.documents(config).items():
        write_json(folder / name, document)


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
    """Decode codes, 4-bit (R, K/2) or 8-bit (R, K), with a scale per block and row, to FP32."""
    known = FORMATS[format]
    columns = codes.shape[1] * (2 if known.element.bits == 4 else 1)
    scale = tensor_scale.float().view(()).to(codes.device)
    values = torch.empty(len(codes), columns, device=codes.device)
    rows = len(codes) if codes.is_meta else rows_of_piece(columns)
    pieces = zip(codes.split(rows), scales.split(rows), values.split(rows), strict=True)
    for piece, its_scales, into in pieces:
        into.copy_(QuantizedTensor(piece, its_scales, scale, known, tuple(into.shape)).dequantize())
    return values


def rows_of_piece(columns: int, block_rows: int = 1) -> int:
    """Return the number of rows of a large matrix to process at a time, whole blocks of rows."""
    return max(_PIECE // (columns * block_rows), 1) * block_rows


_FUSED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Weights of latent attention that serving engines multiply as one matrix, Megatron-LM as two."""


def scales_lost_in_engines(weights: Iterable[tuple[Sequence[str], Weight]]) -> str | None:
    """Return advice about weights that serving engines load with another tensor scale, or None.

    vLLM 0.32.0 and SGLang 0.5.23 load ``_FUSED`` as one matrix with one tensor scale. vLLM takes
    one of the two without an error, and so decodes the other weight wrong.
    """
    scaled = {name for names, weight in weights if weight.format.tensor_scaled for name in names}
    first, second = _FUSED
    modules = sorted(name.removesuffix(first) for name in scaled if name.endswith(first))
    fused = [module for module in modules if module + second in scaled]
    return (
        f"vLLM and SGLang give {fused[0]}{first} and {second} one tensor scale, but they have two "
        f"({len(fused)} such pairs): for these engines keep both in high precision by a matcher, "
        "or use a format without tensor scale"
        if fused
        else None
    )
