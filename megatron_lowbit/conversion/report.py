"""Report of a quantized export: the quantization noise of each weight, as JSON and as a table."""

import math
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import write_json
from megatron_lowbit.checkpoints.reader import CheckpointReader
from megatron_lowbit.console import plain_console
from megatron_lowbit.conversion.layouts.layout import rows_of_piece, write_documents
from megatron_lowbit.conversion.quantized import Quantization
from megatron_lowbit.conversion.quantized_folder import QuantizedFolder

REPORT = "quantization_report.json"
_COLUMNS = 130
_Energy = tuple[float, float]
"""Sums of squares of a weight and of its error."""


def finish(path: Path, tensors: CheckpointReader, plan: Quantization) -> None:
    """Write a layout's further documents and the report; print a row for each block.

    The error of a weight is computed from what :class:`QuantizedFolder` reads.
    """
    write_documents(path, plan.layout, plan.config)
    folder, weights = QuantizedFolder(path), {}
    blocks: dict[int, list[tuple[str, str, _Energy]]] = {}
    for weight in plan.weights.values():
        format = str(weight.format)
        parts = weight.rule.to_hugging_face(weight.rule.read(tensors))
        for name, part in zip(weight.rule.names, parts, strict=True):
            energy = _energy(part, folder.dequantized(name))
            blocks.setdefault(weight.layer.block, []).append((name, format, energy))
            weights[name] = {"format": format, "sqnr_db": _sqnr([energy])}
    total = _sqnr(energy for members in blocks.values() for _, _, energy in members)
    write_json(path / REPORT, {
        "recipe": plan.recipe.name, "layout": plan.layout.name, "sqnr_db": total,
        "weights": weights, "kept": list(plan.unquantized),
    })  # fmt: skip
    columns = ("block", "weights", "formats", "SQNR (dB)", "lowest")
    title = f"recipe {plan.recipe.name} as {plan.layout.name}: {len(weights)} quantized weights"
    table = Table(*columns, title=title, title_justify="left")
    for block, members in sorted(blocks.items()):
        formats = ", ".join(dict.fromkeys(format for _, format, _ in members))
        errors = [(_sqnr([energy]), name) for name, _, energy in members]
        lowest, name = min(errors, key=lambda error: math.inf if error[0] is None else error[0])
        total = _sqnr(energy for _, _, energy in members)
        block_sqnr, low = ("exact" if x is None else f"{x:.2f}" for x in (total, lowest))
        table.add_row(str(block), str(len(members)), formats, block_sqnr, f"{low} {name}")
    plain_console(_COLUMNS).print(table)


def _energy(weight: Tensor, stored: Tensor) -> _Energy:
    """Return the sums of squares of a weight (R, K) and of the error of its stored values."""
    signal = noise = 0.0
    rows = rows_of_piece(weight.shape[1])
    for piece, values in zip(weight.split(rows), stored.split(rows), strict=True):
        exact = piece.double()
        signal += float(exact.square().sum())
        noise += float(exact.sub_(values).square_().sum())
    return signal, noise


def _sqnr(energies: Iterable[_Energy]) -> float | None:
    """Return the signal to quantization noise in dB; None without noise or signal."""
    signal, noise = map(sum, zip(*energies, strict=True))
    return 10 * math.log10(signal / noise) if signal and noise else None
