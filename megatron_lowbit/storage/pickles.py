"""Read a checkpoint's pickles without running what they hold.

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
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed.checkpoint.filesystem as torch_filesystem
import torch.distributed.checkpoint.metadata as torch_metadata
import torch.distributed.checkpoint.planner as torch_planner
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.storage.checkpoint_content import check_common_state, check_metadata

COMMON = "common_state/shard_0_1"
"""Key of the common state in a torch_dist checkpoint."""
_WITH_COMMON = ("common.pt", "model_optim_rng.pt")
"""Files that hold the common state in other formats."""
_PARTS_OF_COMMON = ("args", "iteration", "checkpoint_version")
"""Keys of its parts where they are objects of their own, as in the format fsdp_dtensor."""


class _SavedPath(PurePosixPath):
    """Path of a saved checkpoint. A separate class, because a pickle may set class attributes."""


_KNOWN = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        torch_metadata.Metadata,
        torch_metadata.MetadataIndex,
        torch_metadata.StorageMeta,
        torch_metadata.TensorStorageMetadata,
        torch_metadata.BytesStorageMetadata,
        torch_metadata.ChunkStorageMetadata,
        torch_metadata.TensorProperties,
        torch_metadata._MEM_FORMAT_ENCODING,
        torch_filesystem._StorageInfo,
        # Megatron-LM keeps the plans of all ranks there.
        torch_planner.SavePlan,
        torch_planner.WriteItem,
        torch_planner.WriteItemType,
        torch_planner.TensorWriteData,
        torch_planner.BytesIOWriteData,
        torch.serialization._get_layout,
    )
} | {("torch", "Size"): torch.Size, ("pathlib", "PosixPath"): _SavedPath}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _read_metadata(reader: FileSystemReader, *_: Any, **settings: Any) -> torch_metadata.Metadata:
    """Read a checkpoint's ``.metadata``, confined to data: torch's ``read_metadata`` without code.

    Raises UserError where the file holds anything else, or describes no tensors and objects.
    """
    name, rank = ".metadata", settings.get("rank")
    path = reader.fs.concat_path(reader.path, name if rank is None else f"__{rank}{name}")
    with reader.fs.create_stream(path, "rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
            check_metadata(metadata, str(path))
        except (UserError, OSError):
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            _refuse(path, error)
    metadata.storage_meta = torch_metadata.StorageMeta(load_id=reader.load_id)
    return metadata


def _load_bytes(planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Load an object of a checkpoint as torch's planner does, but without code."""
    key = read_item.dest_index.fqn
    content = load_restricted(key, value)
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], content)
    else:
        planner.state_dict[key] = content


def restrict_torch() -> None:
    """Let all of this process's readers of sharded checkpoints run no code, torch's own included.

    torch unpickles ``.metadata`` and the objects of ``*.distcp`` without restriction.
    """
    if FileSystemReader.read_metadata is not _read_metadata:
        upstream = FileSystemReader.read_metadata
        FileSystemReader.read_metadata = functools.wraps(upstream)(_read_metadata)
        DefaultLoadPlanner.load_bytes = _load_bytes


class Reader(FileSystemReader):
    """torch's reader of a checkpoint directory, confined to data.

    Raises UserError where a file holds anything else, or cannot be decoded.
    """

    def read_metadata(self, *_: Any, **__: Any) -> torch_metadata.Metadata:
        path = Path(self.path) / ".metadata"
        try:
            return _read_metadata(self)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None

    def read_tensor(self, place: torch_filesystem._StorageInfo) -> torch.Tensor:
        """Read one stored chunk of a tensor to the CPU without an additional copy."""
        with self._open(place) as file:
            return load_restricted(file.name, self._slice_file(file, place))

    def read_bytes(self, place: torch_filesystem._StorageInfo) -> bytes:
        """Read a stored object, which stays pickled."""
        with self._open(place) as file:
            file.seek(place.offset)
            return file.read(place.length)

    def read_object(self, place: torch_filesystem._StorageInfo) -> Any:
        """Load a stored object; raise UserError where it is damaged or could run code."""
        return load_restricted(
            Path(self.path) / place.relative_path, io.BytesIO(self.read_bytes(place))
        )

    @contextmanager
    def _open(self, place: torch_filesystem._StorageInfo) -> Iterator[BinaryIO]:
        """Open the file of a stored chunk or object, which must be there in full length."""
        path, end = Path(self.path) / place.relative_path, place.offset + place.length
        try:
            require(path.is_file(), f"{path}: missing")
            size = path.stat().st_size
            require(size >= end, f"{path}: {size} bytes instead of {end}")
            with open(path, "rb") as file:
                yield file
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def saved_tensors(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a torch_dist checkpoint's tensors by their keys; none of other formats.

    Raises UserError where its ``.metadata`` is damaged or holds anything but metadata.
    """
    if not (path / ".metadata").is_file():
        return {}
    entries = Reader(path).read_metadata().state_dict_metadata
    return {
        key: tuple(entry.size)
        for key, entry in entries.items()
        if isinstance(entry, torch_metadata.TensorStorageMetadata)
    }


def check_lengths(path: Path) -> None:
    """Raise UserError where a file of a torch_dist checkpoint is missing or cut short.

    A folder without ``.metadata``, which is written last, is no complete checkpoint; in the format
    ``torch`` of Megatron-LM nothing more is known.
    """
    if not (path / ".metadata").is_file():
        if any(path.glob("**/*.pt")):
            return
        raise UserError(f"{path / '.metadata'}: missing")
    ends: dict[str, int] = {}
    for place in Reader(path).read_metadata().storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in ends.items():
        file = path / name
        require(file.is_file(), f"{file}: missing")
        size = file.stat().st_size
        require(size >= end, f"{file}: {size} bytes instead of {end}")


def check_objects(path: Path) -> None:
    """Raise UserError where an object in a checkpoint's files could run code or is not as saved."""
    for _ in read_objects(path):
        pass


def read_objects(path: Path, keys: Container[str] | None = None) -> Iterator[tuple[Path, str, Any]]:
    """Yield file, key and content of a checkpoint's objects, loaded without running code.

    Tensors of sharded checkpoints are not read, those of ``*.pt`` files are mapped into memory.

    Args:
        path: folder of the checkpoint, in any format.
        keys: keys of the objects in a sharded checkpoint; None for all.

    Raises:
        UserError: an object is damaged, or could run code.
    """
    for file in sorted(path.glob("**/*.pt")):
        require(file.is_file(), f"{file}: is no file")
        content = load_restricted(file, file, mmap=zipfile.is_zipfile(file))
        if file.name in _WITH_COMMON:
            check_common_state(content, str(path))
        yield file, "", content
    if not (path / ".metadata").is_file():
        return
    reader = Reader(path)
    metadata = reader.read_metadata()
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        is_object = isinstance(entry, torch_metadata.BytesStorageMetadata)
        if is_object and (keys is None or index.fqn in keys):
            content = reader.read_object(place)
            if index.fqn == COMMON:
                check_common_state(the_only(content, path), str(path))
            elif index.fqn in _PARTS_OF_COMMON:
                check_common_state({index.fqn: content}, str(path))
            yield path / place.relative_path, index.fqn, content


def the_only(content: Any, path: Path) -> Any:
    """Return the entry of a list of one, which is how Megatron-LM stores an object."""
    is_single = isinstance(content, list) and len(content) == 1
    require(is_single, f"{path}: its common state is damaged")
    return content[0]


def load_restricted(name: Path | str, source: Path | BinaryIO, mmap: bool = False) -> Any:
    """Load a pickle.

    Args:
        name: file or key, for errors.
        source: file, or its content.
        mmap: map the tensors of the file into memory.

    Raises:
        UserError: the pickle is damaged or could run code.
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
        found = (named[1] if named else text.splitlines()[-1])[:120]
        raise UserError(f"{name}: refused: damaged, or a pickle that could run code ({found})")
    raise UserError(f"{name}: damaged ({type(error).__name__})") from None
