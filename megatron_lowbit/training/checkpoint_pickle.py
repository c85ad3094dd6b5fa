"""Reading a checkpoint's pickles without running what they hold.

Three of its file kinds are pickles. torch's ``.metadata`` goes through an unpickler that knows
nothing but what such a file needs; ``common.pt`` and the objects and tensors of ``*.distcp``
through torch's weights_only. Whatever else a file holds ends in a UserError that names the file.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint.filesystem as torch_filesystem
import torch.distributed.checkpoint.metadata as torch_metadata
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy


class _SavedPath(PurePosixPath):
    """Where the checkpoint was written. A class of its own: a pickle may set class attributes."""


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

    _file: str

    def read_metadata(self, *_: Any, **__: Any) -> torch_metadata.Metadata:
        path = Path(self.path) / ".metadata"
        with open(path, "rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # a damaged pickle raises almost anything
                _refuse(path, error)
        if not isinstance(metadata, torch_metadata.Metadata):
            raise UserError(f"{path}: holds {type(metadata).__name__}, not torch's Metadata")
        metadata.storage_meta = torch_metadata.StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        unrestricted = planner.load_bytes

        def load_bytes(item: ReadItem, value: io.BytesIO) -> None:
            clean = io.BytesIO()
            torch.save(torch.load(value, map_location="cpu", weights_only=True), clean)
            clean.seek(0)
            unrestricted(item, clean)

        planner.load_bytes = load_bytes
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            _refuse(Path(self.path) / self._file, error)

    def read_tensor(self, place: torch_filesystem._StorageInfo) -> torch.Tensor:
        """One piece of a tensor, on the CPU, without a copy of it beside."""
        path = Path(self.path) / place.relative_path
        try:
            with open(path, "rb") as file:
                piece = self._slice_file(file, place)
                return torch.load(piece, map_location="cpu", weights_only=True)
        except Exception as error:
            _refuse(path, error)

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        self._file = sinfo.relative_path
        return super()._slice_file(file, sinfo)


class CommonLoader(TorchCommonLoadStrategy):
    """megatron's reader of ``common.pt``, confined to data whatever torch's default is."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Raises UserError where the file holds anything else, or cannot be decoded."""
        path = Path(checkpoint_dir) / "common.pt"
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            _refuse(path, error)


@contextmanager
def confined() -> Iterator[None]:
    """While this lasts megatron.core, which makes its own readers, makes :class:`Reader`."""
    original = torch_dist._get_filesystem_reader
    torch_dist._get_filesystem_reader = lambda directory, cache_metadata=False: Reader(directory)
    try:
        yield
    finally:
        torch_dist._get_filesystem_reader = original


def _refuse(path: Path, error: Exception) -> NoReturn:
    """The texts of torch's errors are pages long, and advise to load the file all the same."""
    if isinstance(error, pickle.UnpicklingError):
        lines = str(error).splitlines() or [""]
        raise UserError(
            f"{path}: refused: damaged, or a pickle that could run code ({lines[0][:120]})"
        ) from None
    raise UserError(f"{path}: damaged ({type(error).__name__})") from None
