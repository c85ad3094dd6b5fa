"""Folder of Hugging Face's: config.json, safetensors in one or more files, tokenizer files.

Tensors are read and written one at a time.
"""

import json
import reprlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.folders import reading
from megatron_lowbit.json_files import as_object, is_inside, parse_json, read_object
from megatron_lowbit.storage.resumable_output import COMPANIONS, ResumableOutput, in_files

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in the heads of safetensors files."""
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights that are not quantized."""
_COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Tensors of old checkpoints that follow from the configuration; the last two are GPT-2's mask."""


class LazyTensors(NamedTuple):
    """Tensors that ``make`` returns together by name, on demand.

    ``outline`` has the same names, shapes and dtypes on the ``meta`` device.
    """

    outline: Mapping[str, Tensor]
    make: Callable[[], dict[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.outline.values())


class Folder:
    """Weights in a folder, to read. ``file_of`` is the file of each tensor."""

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_object(path / CONFIG)
        if (path / INDEX).is_file():
            location = f"{path / INDEX}: weight_map"
            self.file_of = as_object(read_object(path / INDEX).get("weight_map"), location)
            for name, file in self.file_of.items():
                shown = f"{location}: {name}: {reprlib.repr(file)}"
                require(is_inside(file), f"{shown} is not the name of a file in this folder")
            is_single = (path / SINGLE).is_file() and SINGLE not in self.file_of.values()
            both = f"{path}: holds {SINGLE}, which transformers reads, and {INDEX}"
            require(not is_single, f"{both}, which names other files; delete one of them")
        elif (path / SINGLE).is_file():
            with self._open(SINGLE) as opened:
                self.file_of = dict.fromkeys(opened.keys(), SINGLE)
        else:
            advice = "; save its pickled weights as safetensors" if any(path.glob("*.bin")) else ""
            raise UserError(f"{path}: holds neither {INDEX} nor {SINGLE}{advice}")
        if missing := sorted(f for f in set(self.file_of.values()) if not (path / f).is_file()):
            raise UserError(f"{path / missing[0]} is missing: {INDEX} names it")
        for file in sorted(set(self.file_of.values())):
            with self._open(file) as opened:  # The length of a valid head is right.
                _check_keys(path / file)
                for name in sorted(self.file_of.keys() & opened.keys()):
                    other = self.file_of[name]  # transformers may take either
                    where = f"{path / file}: holds {name}, which {INDEX} says is in {other}"
                    require(other == file, f"{where}; remove one of them")
        self._stored_in = self.file_of

    def leave_out(self, starts: tuple[str, ...]) -> int:
        """Ignore the tensors whose names start so; return their number."""
        count = len(self.file_of)
        self.file_of = {n: file for n, file in self.file_of.items() if not n.startswith(starts)}
        return count - len(self.file_of)

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError where these are not all tensors there are, or fewer."""
        names = set(names)
        if missing := sorted(names - self.file_of.keys()):
            raise UserError(f"{self.path}: no tensor {missing[0]} ({len(missing)} are missing)")
        others = (name for name in self.file_of.keys() - names if not name.endswith(_COMPUTED))
        if unknown := sorted(others):
            raise UserError(
                f"{self.path}: tensor {unknown[0]} has no place in the model ({len(unknown)} such)"
            )

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor, from its file's head."""
        with self._open(self._stored_in[name], name) as file:
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            return shape, (part[:0] if shape else file.get_tensor(name)).dtype

    def read(self, name: str) -> Tensor:
        """Read a tensor to the CPU."""
        with self._open(self._stored_in[name], name) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def files(self) -> dict[str, list[int]]:
        """Return length and time of change of each file with weights."""
        stats = {file: (self.path / file).stat() for file in sorted({*self.file_of.values()})}
        return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}

    @contextmanager
    def _open(self, file: str, name: str | None = None) -> Iterator[Any]:
        try:
            with reading(self.path / file), safe_open(self.path / file, "pt") as opened:
                yield opened
        except SafetensorError as error:
            reason = f"cut short, or not a safetensors file ({error})"
            if "does not contain tensor" in str(error):
                reason = f"holds no {name}, which {INDEX} says is there"
            raise UserError(f"{self.path / file}: {reason}") from None


def _check_keys(file: Path) -> None:
    """Raise UserError where a file has two tensors of a name: readers differ in which they take."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        parse_json(opened.read(length), str(file))


def write_tensors(
    partial: ResumableOutput, contents: Sequence[LazyTensors], shard_bytes: int
) -> None:
    """Write weights into a folder, one after another, in files of at most ``shard_bytes`` each.

    Tensors that are made together are in one file, which may be larger. The files that ``partial``
    has finished already are left.
    """
    shards = in_files(contents, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        partial.write(partial.path / file, shard, _write_part, _head(shard))
        weight_map |= {name: file for tensors in shard for name in tensors.outline}
    if len(shards) > 1:
        total = sum(tensors.nbytes for tensors in contents)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(partial.path / INDEX, index)


def _head(shard: Sequence[LazyTensors]) -> bytes:
    """Return the first bytes of a file in safetensors' format.

    It is written here with one tensor in memory at a time; the library's own writer needs all of
    them at once, and copies each.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensors in shard:
        for name, tensor in tensors.outline.items():
            stored = DTYPE_NAMES.get(tensor.dtype)
            require(stored is not None, f"{name}: safetensors holds no {tensor.dtype}")
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": stored, "shape": list(tensor.shape),
                            "data_offsets": [start, end]}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_part(file: BinaryIO, tensors: LazyTensors) -> None:
    contents = tensors.make()
    for name, outline in tensors.outline.items():
        tensor = contents.pop(name)
        if (tensor.shape, tensor.dtype) != (outline.shape, outline.dtype):
            raise ValueError(f"{name}: {tuple(tensor.shape)} {tensor.dtype}")
        file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def copy_companions(source: Path | None, target: Path, config: Mapping[str, Any]) -> None:
    """Write config.json into a folder, and copy another's tokenizer and generation files there."""
    target.mkdir(exist_ok=True)
    write_json(target / CONFIG, config)
    if source is None:
        return
    for file in companion_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(file, copy)


def companion_files(folder: Path) -> list[Path]:
    """Return a folder's tokenizer and generation files.

    Raises UserError if one, or config.json, is a link out of the folder: a conversion would publish
    what it points to. In Hugging Face's cache, the files of a folder are links into ``blobs``.
    """
    files = {file for pattern in COMPANIONS for file in folder.glob(pattern) if file.is_file()}
    root = folder.resolve()
    blobs = root.parent.with_name("blobs") if root.parent.name == "snapshots" else root
    for file in sorted(files | {folder / CONFIG}):
        target = file.resolve()
        require(
            target.is_relative_to(root) or target.parent == blobs,
            f"{file}: a link out of this folder is not followed; put the file itself there",
        )
    return sorted(files)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, for people to read."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
