"""A folder of Hugging Face's: config.json, safetensors in one file or several, and what goes along.

Tensors are read one at a time, and written a file at a time.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_lowbit.errors import UserError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CARRIED = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
           "chat_template*", "generation_config.json", "*.model")  # fmt: skip
"""Files beside the weights that a converted folder keeps."""


class Folder:
    """Weights to read. ``file_of`` says where each tensor is."""

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_json(path / CONFIG)
        if (path / INDEX).is_file():
            self.file_of: dict[str, str] = read_json(path / INDEX).get("weight_map", {})
        elif (path / SINGLE).is_file():
            with self._open(SINGLE) as file:
                self.file_of = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise UserError(f"{path}: holds neither {INDEX} nor {SINGLE}")
        missing = sorted({f for f in self.file_of.values() if not (path / f).is_file()})
        if missing:
            raise UserError(f"{path / missing[0]} is missing: {INDEX} names it")

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError where these are not all tensors there are, or fewer."""
        names = set(names)
        if missing := sorted(names - self.file_of.keys()):
            raise UserError(f"{self.path}: no tensor {missing[0]} ({len(missing)} are missing)")
        if unknown := sorted(self.file_of.keys() - names - _computed(self.file_of)):
            raise UserError(
                f"{self.path}: tensor {unknown[0]} has no place in the model ({len(unknown)} such)"
            )

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Of a tensor, from its file's head."""
        with self._open(self.file_of[name]) as file:
            part = file.get_slice(name)
            empty = part[:0] if part.get_shape() else file.get_tensor(name)
            return tuple(part.get_shape()), empty.dtype

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU."""
        with self._open(self.file_of[name]) as file:
            return file.get_tensor(name)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{self.path / file}: not a safetensors file: {error}") from None


def _computed(names: Iterable[str]) -> set[str]:
    """Tensors that old checkpoints hold, but that follow from the configuration."""
    return {name for name in names if name.endswith("rotary_emb.inv_freq")}


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write weights into a folder, files of at most ``shard_bytes`` each.

    A larger tensor has a file of its own.
    """
    files: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        save_file(shard, path / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(files) == 1:
        (path / "part-0.safetensors").rename(path / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (path / f"part-{number}.safetensors").rename(path / name)
        weight_map |= dict.fromkeys(names, name)
    write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def carry(source: Path | None, target: Path, config: dict[str, Any]) -> None:
    """Write config.json into a folder, and copy another's tokenizer and generation files there."""
    target.mkdir(exist_ok=True)
    write_json(target / CONFIG, config)
    for pattern in CARRIED if source is not None else ():
        for file in sorted(source.glob(pattern)):
            shutil.copy2(file, target / file.name)


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError that names the file where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, for people to read."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
