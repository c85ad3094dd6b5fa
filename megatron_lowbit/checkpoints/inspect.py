"""Description of a checkpoint: tensors, chunks and files, and the arguments of its run."""

import math
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG, Folder
from megatron_lowbit.checkpoints.model_arguments import described_by
from megatron_lowbit.checkpoints.reader import open_checkpoint
from megatron_lowbit.errors import printable
from megatron_lowbit.json_files import Entries
from megatron_lowbit.recipes.record import digest
from megatron_lowbit.storage import files

Row = dict[str, Any]
_UNKNOWN: dict[str, Any] = {
    "iteration": None, "args": {}, "recipes": [], "recipe_set": [], "recipe_record": None,
    "recipe_sha256": None, "data": {}, "averaged": None, "optimizer": None, "amax_histories": [],
    "checksums": False,
}  # fmt: skip
"""Entries of a description that Hugging Face's files do not have."""


def inspect(source: Path) -> dict[str, Any]:
    """Describe a checkpoint as JSON: a directory's newest, one iteration, or Hugging Face's.

    "tensors" are rows of key, shape, dtype, bytes and the number and shapes of chunks, called
    pieces (for Hugging Face's files, the file); "parameters" and "bytes" are the model's totals,
    "optimizer" the totals of its tensors; "model" holds the arguments that say what the model
    computes.

    Raises UserError where it is none of these. Tensors are not read.
    """
    is_hugging_face = (source / CONFIG).is_file() and not (source / files.TRACKER).is_file()
    return _hugging_face(source) if is_hugging_face else _megatron(source)


def _megatron(source: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(source, check=False)
    args, record = checkpoint.args, checkpoint.recipe_record
    model, state, histories = (
        [_stored_row(key, entry) for key, entry in part.items()]
        for part in (checkpoint.model, checkpoint.state, checkpoint.histories)
    )
    return {
        "format": "torch_dist",
        "path": str(checkpoint.path),
        "iteration": checkpoint.iteration,
        "model": {name: _plain(value) for name, value in described_by(args).items()},
        "args": {name: _plain(value) for name, value in sorted(vars(args).items())},
        "recipes": checkpoint.recipes,
        "recipe_set": checkpoint.recipe_set,
        "recipe_record": record,
        "recipe_sha256": None if record is None else digest(record),
        "data": checkpoint.data_record,
        "averaged": Entries(checkpoint.common, str(checkpoint.path)).integers("averaged") or None,
        "tensors": model,
        **_sums(model),
        "optimizer": {"tensors": len(state), **_sums(state)},
        "amax_histories": histories,
        "checksums": checkpoint.files is not None,
        "files": {file.name: file.stat().st_size for file in sorted(checkpoint.path.iterdir())},
    }


def _plain(value: Any) -> Any:
    """Return a value if JSON can hold it, or else its text."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    return str(value) if isinstance(value, torch.dtype | Enum | dict) else type(value).__name__


def _hugging_face(source: Path) -> dict[str, Any]:
    folder = Folder(source)
    rows = [
        _row(name, *folder.shape(name)) | {"pieces": 1, "file": file}
        for name, file in sorted(folder.file_of.items())
    ]
    return _UNKNOWN | {
        "format": "safetensors",
        "path": str(source),
        "model": folder.config,
        "tensors": rows,
        **_sums(rows),
        "files": {name: size for name, (size, _) in folder.files().items()},
    }


def _row(key: str, shape: Iterable[int], dtype: Any) -> Row:
    shape = list(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    return {"key": key, "shape": shape, "dtype": str(dtype).removeprefix("torch."), "bytes": nbytes}


def _stored_row(key: str, entry: TensorStorageMetadata) -> Row:
    shapes = [list(shape) for shape in sorted({tuple(chunk.sizes) for chunk in entry.chunks})]
    row = _row(key, entry.size, entry.properties.dtype)
    return row | {"pieces": len(entry.chunks), "piece_shapes": shapes}


def _sums(rows: list[Row]) -> dict[str, int]:
    return {
        "parameters": sum(math.prod(row["shape"]) for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
    }


def report(checkpoint: dict[str, Any]) -> list[str]:
    """Format a description as lines of text."""
    where = f"iteration {checkpoint['iteration']}, " if checkpoint["iteration"] is not None else ""
    lines = [
        f"{checkpoint['path']}: {where}{checkpoint['format']}",
        "",
        *_table([_cells(row) for row in checkpoint["tensors"]]),
        "",
        f"model: {checkpoint['parameters']:,} parameters, {checkpoint['bytes']:,} bytes, "
        f"{len(checkpoint['tensors'])} tensors",
    ]
    if optimizer := checkpoint["optimizer"]:
        lines.append(f"optimizer: {optimizer['tensors']} tensors, {optimizer['bytes']:,} bytes")
    if histories := checkpoint["amax_histories"]:
        lengths = sorted({row["shape"][-1] for row in histories})
        steps = " or ".join(map(str, lengths))
        lines.append(f"amax histories: {len(histories)} layers, {steps} steps")
    if averaged := checkpoint["averaged"]:
        lines.append(f"mean of iterations {', '.join(map(str, averaged))}")
    if checkpoint["recipes"]:
        changes = [f"--recipe-set {change}" for change in checkpoint["recipe_set"]]
        lines.append(f"recipe: {' '.join([*checkpoint['recipes'], *changes])}")
    if (sha256 := checkpoint["recipe_sha256"]) is not None:
        lines.append(f"text of the recipe: SHA-256 {sha256}")
    lines += [f"data: {prefix}, SHA-256 {sha256}" for prefix, sha256 in checkpoint["data"].items()]
    sizes = [f"{name} ({size:,})" for name, size in checkpoint["files"].items()]
    lines.append(f"files: {', '.join(sizes)}")
    lines += ["", *(f"{key}: {value}" for key, value in checkpoint["model"].items())]
    return list(map(printable, lines))


def _cells(row: Row) -> list[str]:
    shapes = row.get("piece_shapes", ())
    alike = f"{row['pieces']} x {shapes[0]}" if len(shapes) == 1 else None
    pieces = row.get("file") or alike or f"{row['pieces']}, of {len(shapes)} shapes"
    return [row["key"], str(row["shape"]), row["dtype"], f"{row['bytes']:,}", pieces]


def _table(rows: list[list[str]]) -> list[str]:
    head = ["tensor", "shape", "dtype", "bytes", "pieces"]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
