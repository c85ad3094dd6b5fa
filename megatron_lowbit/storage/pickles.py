"""Reading of a checkpoint's pickles without running what they hold.

torch's ``.metadata`` goes through an unpickler that knows nothing but what such a file needs;
``common.pt`` and the objects and tensors of ``*.distcp`` through torch's weights_only with
Megatron-LM's list of safe classes. Whatever else a file holds ends in a UserError that names it.
"""

import functools
import io
import pickle
import re
import zipfile
from collections.abc import Container, Iterator
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed.checkpoint import FileSystemReader, planner
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.folders import reading
from megatron_lowbit.json_files import read_object
from megatron_lowbit.storage.checkpoint_content import check_common_state, check_metadata

CONFIG = "metadata.json"
COMMON = "common_state/shard_0_1"
"""Key of the common state in a torch_dist checkpoint."""
WITH_COMMON = ("common.pt", "model_optim_rng.pt")
"""Files that hold the common state in other formats."""
_PARTS_OF_COMMON = ("args", "iteration", "checkpoint_version")
"""Keys of its parts where they are objects of their own, as in the format fsdp_dtensor."""


class _SavedPath(PurePosixPath):
    """Path of a saved checkpoint. A separate class, because a pickle may set class attributes."""


_CLASSES: tuple[Any, ...] = (
    Metadata, torch_metadata.MetadataIndex, StorageMeta, torch_metadata.TensorStorageMetadata,
    BytesStorageMetadata, torch_metadata.ChunkStorageMetadata, torch_metadata.TensorProperties,
    torch_metadata._MEM_FORMAT_ENCODING, _StorageInfo, _StoragePrefix,
    # Megatron-LM keeps the plans of all ranks there.
    planner.SavePlan, planner.WriteItem, planner.WriteItemType, planner.TensorWriteData,
    planner.BytesIOWriteData, torch.serialization._get_layout,
)  # fmt: skip
_KNOWN = {(known.__module__, known.__qualname__): known for known in _CLASSES}
_KNOWN |= {("torch", "Size"): torch.Size, ("pathlib", "PosixPath"): _SavedPath}
_ABSENT = object()
"""Value of an attribute that a class does not have."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


@contextmanager
def _unchanged_classes() -> Iterator[None]:
    """Raise UnpicklingError where a pickle has set an attribute of a class, and restore it."""
    known: list[Any] = [each for each in _KNOWN.values() if hasattr(each, "__dict__")]
    for each in _KNOWN.values():
        known += each if isinstance(each, EnumType) else ()
    before = [dict(vars(each)) for each in known]
    changed = []
    try:
        yield
    finally:
        for each, attributes in zip(known, before, strict=True):
            now = dict(vars(each))
            for name in {**now, **attributes}.keys() - {"__slotnames__"}:  # which copyreg adds
                if now.get(name, _ABSENT) is not attributes.get(name, _ABSENT):
                    changed.append(f"{getattr(each, '__name__', each)}.{name}")
                    if name in attributes:
                        setattr(each, name, attributes[name])
                    else:
                        delattr(each, name)
    if changed:
        raise pickle.UnpicklingError(f"it sets {', '.join(changed)}")


def load_restricted(name: Path | str, source: Path | BinaryIO, mmap: bool = False) -> Any:
    """Load a pickle; raise UserError, with the name, where it is damaged or could run code.

    With ``mmap`` the tensors of a file are mapped into memory.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged pickle raises almost anything
        _refuse(name, error)


def _refuse(name: Path | str, error: Exception) -> NoReturn:
    """Raise a one-line UserError: torch's own messages are long and advise unsafe loading."""
    if isinstance(error, OSError) and error.strerror:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    if isinstance(error, pickle.UnpicklingError):
        text = str(error)
        named = re.search(r"GLOBAL (\S+)", text) or re.search(r"Unpickler error: (.+)", text)
        reason = (named[1] if named else text.splitlines()[-1])[:120]
        raise UserError(f"{name}: refused: damaged, or a pickle that could run code ({reason})")
    raise UserError(f"{name}: damaged ({type(error).__name__})") from None


def _read_metadata(reader: FileSystemReader, *_: Any, **settings: Any) -> Metadata:
    """Read a checkpoint's ``.metadata``, confined to data: torch's ``read_metadata`` without code.

    Raises UserError where the file holds anything else, or describes no tensors and objects.
    """
    rank = settings.get("rank")
    name = ".metadata" if rank is None else f"__{rank}.metadata"
    path = reader.fs.concat_path(reader.path, name)
    try:
        with reader.fs.create_stream(path, "rb") as file, _unchanged_classes():
            metadata = _MetadataUnpickler(file).load()
        check_metadata(metadata, str(path))
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        _refuse(path, error)
    metadata.storage_meta = StorageMeta(load_id=reader.load_id)
    return metadata


def _load_bytes(loading: DefaultLoadPlanner, item: planner.ReadItem, value: io.BytesIO) -> None:
    """Load an object of a checkpoint as torch's planner does, but without code."""
    key = item.dest_index.fqn
    content = load_restricted(key, value)
    if loading.flatten_state_dict:
        set_element(loading.original_state_dict, loading.mappings[key], content)
    else:
        loading.state_dict[key] = content


def restrict_torch() -> None:
    """Let all of this process's readers of sharded checkpoints run no code, torch's own included.

    torch unpickles ``.metadata`` and the objects of ``*.distcp`` without restriction.
    """
    if FileSystemReader.read_metadata is not _read_metadata:
        upstream = FileSystemReader.read_metadata
        FileSystemReader.read_metadata = functools.wraps(upstream)(_read_metadata)
        DefaultLoadPlanner.load_bytes = _load_bytes


class Reader(FileSystemReader):  # type: ignore[misc]
    """torch's reader of a checkpoint directory, confined to data.

    Raises UserError where a file holds anything else, or cannot be decoded.
    """

    read_metadata = _read_metadata

    def read_tensor(self, location: _StorageInfo) -> torch.Tensor:
        """Read one stored chunk of a tensor to the CPU without an additional copy."""
        with self._open(location) as file:
            tensor: torch.Tensor = load_restricted(file.name, self._slice_file(file, location))
            return tensor

    def read_bytes(self, location: _StorageInfo) -> bytes:
        """Read a stored object, which stays pickled."""
        with self._open(location) as file:
            file.seek(location.offset)
            return file.read(location.length)

    def read_object(self, location: _StorageInfo) -> Any:
        """Load a stored object; raise UserError where it is damaged or could run code."""
        file = Path(self.path) / location.relative_path
        return load_restricted(file, io.BytesIO(self.read_bytes(location)))

    @contextmanager
    def _open(self, location: _StorageInfo) -> Iterator[BinaryIO]:
        path = Path(self.path) / location.relative_path
        with reading(path):
            _check_length(path, location.offset + location.length)
            with open(path, "rb") as file:
                yield file


def _check_length(file: Path, least: int) -> None:
    require(file.is_file(), f"{file}: missing")
    size = file.stat().st_size
    require(size >= least, f"{file}: {size} bytes instead of {least}")


def saved_tensors(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a torch_dist checkpoint's tensors by their keys; none of other formats.

    Raises UserError where its ``.metadata`` is damaged or holds anything but metadata.
    """
    if not (path / ".metadata").is_file():
        return {}
    entries = Reader(path).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in entries.items() if hasattr(entry, "size")}


def check_lengths(path: Path) -> None:
    """Raise UserError where a file of a torch_dist checkpoint is missing or cut short.

    Its last files are ``.metadata`` and ``metadata.json``, in this order, without which it is no
    complete checkpoint; in the format ``torch`` of Megatron-LM nothing more is known.
    """
    if not (path / ".metadata").is_file():
        require(any(path.glob("**/*.pt")), f"{path / '.metadata'}: missing")
        return
    metadata = Reader(path).read_metadata()
    if COMMON in metadata.state_dict_metadata:  # Other formats have no metadata.json.
        read_object(path / CONFIG)
    ends: dict[str, int] = {}
    for location in metadata.storage_data.values():
        end = location.offset + location.length
        ends[location.relative_path] = max(end, ends.get(location.relative_path, 0))
    for name, end in ends.items():
        _check_length(path / name, end)


def read_objects(path: Path, keys: Container[str] | None = None) -> Iterator[tuple[Path, str, Any]]:
    """Yield file, key and content of a checkpoint's objects, loaded without running code.

    Tensors of sharded checkpoints are not read; tensors of ``*.pt`` files are mapped into memory.
    ``path`` is the checkpoint's folder, in any format; ``keys`` are of the objects in a sharded
    checkpoint, None for all. Raises UserError for an object that is damaged, or could run code.
    """
    for file in sorted(path.glob("**/*.pt")):
        require(file.is_file(), f"{file}: is no file")
        content = load_restricted(file, file, mmap=zipfile.is_zipfile(file))
        if file.name in WITH_COMMON:
            check_common_state(content, str(path))
        yield file, "", content
    if not (path / ".metadata").is_file():
        return
    reader = Reader(path)
    metadata = reader.read_metadata()
    for index, location in metadata.storage_data.items():
        key, entry = index.fqn, metadata.state_dict_metadata[index.fqn]
        if not isinstance(entry, BytesStorageMetadata) or not (keys is None or key in keys):
            continue
        content = reader.read_object(location)
        if key == COMMON:
            check_common_state(the_only(content, path), str(path))
        elif key in _PARTS_OF_COMMON:
            check_common_state({key: content}, str(path))
        yield path / location.relative_path, key, content


def the_only(content: Any, path: Path) -> Any:
    """Return the entry of a list of one, which is how Megatron-LM stores an object."""
    is_single = isinstance(content, list) and len(content) == 1
    require(is_single, f"{path}: its common state is damaged")
    return content[0]
