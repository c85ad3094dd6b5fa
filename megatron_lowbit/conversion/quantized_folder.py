"""Folders of which some weights are quantized, or stored in tensors of several weights."""

import reprlib
from pathlib import Path

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG, Folder
from megatron_lowbit.conversion.layouts import METHODS
from megatron_lowbit.conversion.layouts.by_module import DOCUMENT, MODELOPT
from megatron_lowbit.conversion.layouts.gpt_oss import stored_experts
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import as_object, read_object

QUANTIZATION = "quantization_config"
_OF_ACTIVATIONS = ("input_scale", "input_global_scale", "k_scale", "v_scale")
"""Scales that say nothing about weights."""


class QuantizedFolder(Folder):
    """Folder whose weights are dequantized to BF16 where they are quantized.

    Raises UserError for a quantization method that is not read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        quantization = self.config.pop(QUANTIZATION, None)
        if quantization is None and (path / DOCUMENT).is_file():
            # ModelOpt's older exports have it in another file only.
            entry = read_object(path / DOCUMENT).get("quantization") or {}
            quantization = {"quant_method": MODELOPT.method} | as_object(
                entry, f"{path / DOCUMENT}"
            )
        self.is_quantized = quantization is not None
        self._weights = stored_experts(self.file_of, self.config)
        if self.is_quantized:
            location = f"{path / CONFIG}: {QUANTIZATION}"
            method = as_object(quantization, location).get("quant_method")
            if not isinstance(method, str) or method not in METHODS:
                known = ", ".join(METHODS)
                shown = reprlib.repr(method)
                raise UserError(f"{location}: quant_method {shown} is not one of {known}")
            config = self.config | {QUANTIZATION: quantization}
            self._weights |= METHODS[method].stored(self.file_of, config)
        parts = {part for stored in self._weights.values() for part in stored.parts}
        if missing := sorted(parts - self.file_of.keys()):
            raise UserError(f"{path}: no tensor {missing[0]} ({len(missing)} are missing)")
        ignored = _OF_ACTIVATIONS if self.is_quantized else ()
        self.file_of = {
            name: file
            for name, file in self._stored_in.items()
            if name not in parts and not name.endswith(ignored)
        }
        for name, stored in self._weights.items():
            self.file_of[name] = self._stored_in[stored.parts[0]]

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the tensor that :meth:`read` returns."""
        shape, dtype = super().shape(name) if name not in self._weights else self._outline(name)
        # Megatron-LM stacks the tensors of all layers, which therefore have one dtype.
        return shape, torch.bfloat16 if self.is_quantized and len(shape) > 1 else dtype

    def read(self, name: str) -> Tensor:
        tensor = self.dequantized(name)
        return tensor.to(torch.bfloat16) if self.is_quantized and tensor.ndim > 1 else tensor

    def dequantized(self, name: str) -> Tensor:
        """Read a quantized weight in FP32, or another tensor as it is."""
        if name not in self._weights:
            return super().read(name)
        weight = self._weights[name]
        parts = []
        for part in weight.parts:
            with self._open(self._stored_in[part], part) as file:
                entry = weight.entry
                parts.append(
                    file.get_tensor(part) if entry is None else file.get_slice(part)[entry]
                )
        return weight.decode(*parts)

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that a tensor is made of."""
        return self._weights[name].parts if name in self._weights else (name,)

    def stored(self, part: str, outline: bool = False) -> Tensor:
        """Read a stored tensor as it is, or an outline of it on the ``meta`` device."""
        if outline:
            shape, dtype = super().shape(part)
            return torch.empty(shape, dtype=dtype, device="meta")
        return super().read(part)

    def _outline(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a weight that is stored in another form."""
        weight = self._weights[name]
        codes, outlines = weight.parts[0], [self.stored(part, True) for part in weight.parts]
        dtype, expected = outlines[0].dtype, weight.dtype or outlines[0].dtype
        require(dtype == expected, f"{self.path}: {codes} is {dtype}; these codes are {expected}")
        if weight.entry is not None:
            outlines = [outline.new_empty(outline.shape[1:]) for outline in outlines]
        try:
            decoded = weight.decode(*outlines)
        except RuntimeError:
            shapes = ", ".join(str(list(outline.shape)) for outline in outlines)
            why = f"{codes} and its scales do not fit together: {shapes}"
            raise UserError(f"{self.path}: {why}") from None
        return tuple(decoded.shape), decoded.dtype
