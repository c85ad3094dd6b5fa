"""Read a checkpoint's pickles without running what they hold.

torch's ``.metadata`` goes through an unpickler that knows nothing but what such a file needs;
``common.pt`` and the objects and tensors of ``*.distcp`` through torch's weights_only with
Megatron-LM's list of safe classes. Whatever else a file holds ends in a UserError that names it.
"""

import io
import pickle
import re
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint.filesystem as torch_filesystem
import torch.distributed.checkpoint.metadata as torch_metadata
import torch.distributed.checkpoint.planner as torch_planner
from torch.distributed.checkpoint import FileSystemReader

from megatron_lowbit.errors import UserError, require


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


class Reader(FileSystemReader):
    """torch's reader of a checkpoint directory, confined to data.

    Raises UserError where a file holds anything else, or cannot be decoded.
    """

    def read_metadata(self, *_: Any, **__: Any) -> torch_metadata.Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except Exception as error:  # a damaged pickle raises almost anything
            _refuse(path, error)
        if not isinstance(metadata, torch_metadata.Metadata):
            raise UserError(f"{path}: holds {type(metadata).__name__}, not torch's Metadata")
        metadata.storage_meta = torch_metadata.StorageMeta(load_id=self.load_id)
        return metadata

    def read_tensor(self, place: torch_filesystem._StorageInfo) -> torch.Tensor:
        """Read one stored chunk of a tensor to the CPU without an additional copy."""
        path = Path(self.path) / place.relative_path
        try:
            with open(path, "rb") as file:
                piece = self._slice_file(file, place)
                return torch.load(piece, map_location="cpu", weights_only=True)
        except Exception as error:
            _refuse(path, error)

    def read_bytes(self, place: torch_filesystem._StorageInfo) -> bytes:
        """Read a stored object, which stays pickled."""
        path = Path(self.path) / place.relative_path
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                return file.read(place.length)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None

    def read_object(self, place: torch_filesystem._StorageInfo) -> Any:
        """Load a stored object; raise UserError where it is damaged or could run code."""
        return load_restricted(Path(self.path) / place.relative_path, self.read_bytes(place))


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

    A folder without ``.metadata``, which is written last, is no complete checkpoint; in the formats
    ``torch`` and ``fsdp_dtensor`` of Megatron-LM nothing more is known.
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
    """Raise UserError where an object in a torch_dist checkpoint's files could run code.

    torch's loader unpickles these objects without restriction. Tensors it reads with weights_only.
    """
    common = path / "common.pt"
    if common.is_file():
        load_restricted(common, common.read_bytes())
    if not (path / ".metadata").is_file():
        return
    reader = Reader(path)
    metadata = reader.read_metadata()
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata.get(index.fqn)
        if isinstance(entry, torch_metadata.BytesStorageMetadata):
            reader.read_object(place)


def load_restricted(path: Path, content: bytes) -> Any:
    """Load a pickle that a file holds.

    Raises UserError where it is damaged or could run code.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises almost anything
        _refuse(path, error)


def _refuse(path: Path, error: Exception) -> NoReturn:
    """Raise a one-line UserError: torch's own messages are long and advise unsafe loading."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL (\S+)", str(error))
        found = named[1] if named else str(error).splitlines()[-1][:120]
        raise UserError(f"{path}: refused: damaged, or a pickle that could run code ({found})")
    raise UserError(f"{path}: damaged ({type(error).__name__})") from None
