"""Readers of folders whose weights are quantized, or stored in tensors of several weights."""

import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG, Folder
from megatron_lowbit.conversion.layouts import METHODS, Stored
from megatron_lowbit.conversion.layouts.gpt_oss import stored_experts
from megatron_lowbit.conversion.layouts.modelopt import DOCUMENT
from megatron_lowbit.conversion.layouts.modelopt import METHOD as MODELOPT
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import as_object, read_object

QUANTIZATION = "quantization_config"
_OF_ACTIVATIONS = ("input_scale", "input_global_scale", "k_scale", "v_scale")
"""Scales that say nothing about weights."""


def open_folder(path: Path) -> Folder:
    """Open a folder, whose weights are dequantized to BF16 where they are quantized.

    Raises UserError for a kind of quantization that is not read.
    """
    config = read_object(path / CONFIG)
    quantization = config.get(QUANTIZATION)
    if quantization is None and (path / DOCUMENT).is_file():
        # ModelOpt's older exports have it in another file only.
        entry = read_object(path / DOCUMENT).get("quantization") or {}
        quantization = {"quant_method": MODELOPT} | as_object(entry, f"{path / DOCUMENT}")
    if quantization is None:
        return StoredFolder(path, config, stored_experts)
    place = f"{path / CONFIG}: {QUANTIZATION}"
    method = as_object(quantization, place).get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise UserError(f"{place}: quant_method {reprlib.repr(method)} is not one of {known}")
    layout = METHODS[method]

    def stored(names: Iterable[str], config: dict[str, Any]) -> dict[str, Stored]:
        return stored_experts(names, config) | layout.stored(names, config)

    return QuantizedFolder(path, config | {QUANTIZATION: quantization}, stored)


class StoredFolder(Folder):
    """Folder of which some weights are stored in another form.

    Args:
        path: the folder.
        config: its config.json, with ``quantization_config``.
        stored: function from the names of its tensors and the config to those weights.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        stored: Callable[[Iterable[str], dict[str, Any]], Mapping[str, Stored]],
    ) -> None:
        super().__init__(path)
        self.config = {key: value for key, value in config.items() if key != QUANTIZATION}
        self._weights = stored(self.file_of, config)
        parts = {part for stored in self._weights.values() for part in stored.parts}
        if missing := sorted(parts - self.file_of.keys()):
            raise UserError(f"{path}: no tensor {missing[0]} ({len(missing)} are missing)")
        self.file_of = {name: file for name, file in self._stored_in.items() if name not in parts}
        for name, stored in self._weights.items():
            self.file_of[name] = self._stored_in[stored.parts[0]]

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor as :meth:`read` gives it."""
        if name not in self._weights:
            return super().shape(name)
        stored = self._weights[name]
        parts = [self._outline(part, stored.entry) for part in stored.parts]
        codes, dtype = stored.parts[0], parts[0].dtype
        expected = stored.dtype or dtype
        require(dtype == expected, f"{self.path}: {codes} is {dtype}; these codes are {expected}")
        try:
            decoded = stored.decode(*parts)
        except RuntimeError:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            why = f"{codes} and its scales do not fit together: {shapes}"
            raise UserError(f"{self.path}: {why}") from None
        return tuple(decoded.shape), decoded.dtype

    def read(self, name: str) -> Tensor:
        """Read a tensor to the CPU, a quantized one in FP32."""
        if name not in self._weights:
            return super().read(name)
        stored = self._weights[name]
        return stored.decode(*(self._part(part, stored.entry) for part in stored.parts))

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that a tensor is made of."""
        return self._weights[name].parts if name in self._weights else (name,)

    def _outline(self, part: str, entry: int | None) -> Tensor:
        """Return a part without content."""
        shape, dtype = super().shape(part)
        return torch.empty(shape if entry is None else shape[1:], dtype=dtype, device="meta")

    def _part(self, part: str, entry: int | None) -> Tensor:
        with self._open(self._stored_in[part], part) as file:
            return file.get_tensor(part) if entry is None else file.get_slice(part)[entry]


class QuantizedFolder(StoredFolder):
    """Folder with quantized weights, whose matrices are read as BF16."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.file_of = {
            name: file for name, file in self.file_of.items() if not name.endswith(_OF_ACTIVATIONS)
        }

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor as :meth:`read` gives it."""
        shape, dtype = super().shape(name)
        # Megatron-LM stacks the tensors of all layers, which therefore have one dtype.
        return shape, torch.bfloat16 if len(shape) > 1 else dtype

    def read(self, name: str) -> Tensor:
        """Read a tensor to the CPU."""
        tensor = self.dequantized(name)
        return tensor.to(torch.bfloat16) if tensor.ndim > 1 else tensor

    def dequantized(self, name: str) -> Tensor:
        """Read a quantized weight in FP32, or another tensor as it is."""
        return super().read(name)
