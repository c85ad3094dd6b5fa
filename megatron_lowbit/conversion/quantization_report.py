"""Error of quantized weights, read back from the files written."""

from collections.abc import Iterable
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from megatron_lowbit.checkpoints.hugging_face_files import write_json
from megatron_lowbit.checkpoints.reader import CheckpointReader
from megatron_lowbit.console import plain_console
from megatron_lowbit.conversion.quantized import Quantization
from megatron_lowbit.conversion.quantized_folder import open_folder

_COLUMNS = 130
REPORT = "quantization_report.json"


class Energy(NamedTuple):
    """Sums of squares of a weight and of its error."""

    signal: float
    noise: float

    @property
    def sqnr(self) -> float | None:
        """Signal to quantization noise in dB; None without noise or signal."""
        return 10 * log10(self.signal / self.noise) if self.signal and self.noise else None


def finish(path: Path, tensors: CheckpointReader, plan: Quantization) -> None:
    """Write a layout's further documents and the report; print a row for each block."""
    for name, document in plan.documents.items():
        write_json(path / name, document)
    folder = open_folder(path)
    weights: dict[str, Any] = {}
    blocks: dict[int, dict[str, Energy]] = {}
    for weight in plan.weights.values():
        parts = weight.transform.to_hugging_face(weight.read(tensors).float())
        for name, part in zip(weight.names, parts, strict=True):
            energy = _energy(part, folder.dequantized(name))
            blocks.setdefault(weight.layer.block, {})[name] = energy
            format = str(weight.quantizer.format)
            weights[name] = {"format": format, "sqnr_db": energy.sqnr}
    whole = _total(energy for energies in blocks.values() for energy in energies.values())
    write_json(path / REPORT, {
        "recipe": plan.recipe.name, "layout": plan.layout.name, "sqnr_db": whole.sqnr,
        "weights": weights, "kept": list(plan.unquantized),
    })  # fmt: skip
    _print(plan, blocks, weights)


def _energy(exact: torch.Tensor, quantized: torch.Tensor) -> Energy:
    noise = (exact - quantized).square().sum(dtype=torch.float64)
    return Energy(float(exact.square().sum(dtype=torch.float64)), float(noise))


def _total(energies: Iterable[Energy]) -> Energy:
    return Energy(*(sum(column) for column in zip(*energies, strict=True)))


def _print(
    plan: Quantization, blocks: dict[int, dict[str, Energy]], weights: dict[str, Any]
) -> None:
    columns = ("block", "weights", "formats", "SQNR (dB)", "lowest")
    title = f"recipe {plan.recipe.name} as {plan.layout.name}: {len(weights)} quantized weights"
    table = Table(*columns, title=title, title_justify="left")
    for block, energies in sorted(blocks.items()):
        formats = dict.fromkeys(weights[name]["format"] for name in energies)
        lowest = min(energies, key=lambda name: _shown(energies[name])[1])
        whole = _shown(_total(energies.values()))[0]
        low = f"{_shown(energies[lowest])[0]} {lowest}"
        table.add_row(str(block), str(len(energies)), ", ".join(formats), whole, low)
    plain_console(_COLUMNS).print(table)


def _shown(energy: Energy) -> tuple[str, float]:
    """Return an energy's SQNR as text and as a number to compare."""
    value = energy.sqnr
    return ("exact", float("inf")) if value is None else (f"{value:.2f}", value)
