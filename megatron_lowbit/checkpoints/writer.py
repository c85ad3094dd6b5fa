"""Writer of Megatron-LM's ``torch_dist`` checkpoints: one tensor at a time, file by file."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from megatron_lowbit.checkpoints.reader import TensorSlice
from megatron_lowbit.megatron.run.common_state import KEY, as_object
from megatron_lowbit.storage import files
from megatron_lowbit.storage.resumable_output import ResumableOutput, Span, in_files

COMMON = {
    "checkpoint_version": 3.0,
    "num_floating_point_operations_so_far": 0,
    "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
}
"""The common state beside ``args`` and ``iteration`` where a checkpoint holds a model alone."""

_EXTRA_STATE = re.compile(
    r"(.*\b(?:linear_\w+|in_proj|out_proj|output_layer|\w+_layernorm|final_norm))"
    r"\.(?:weight|bias)\b"
)


class LazyChunk(NamedTuple):
    """Chunk of the tensor ``key`` that ``make`` returns on demand.

    ``shape`` is the chunk's, at ``offset`` of a tensor of shape ``whole``; the tensor of ``make``
    may lack leading axes of length 1. Without a dtype it is an object, a pickle in bytes.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype | None
    make: Callable[[], Tensor | bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize if self.dtype else 0


def object_chunk(key: str, content: bytes) -> LazyChunk:
    """Return an object, already pickled."""
    return LazyChunk(key, (), (), (), None, lambda: content)


def extra_states(targets: Iterable[TensorSlice]) -> list[LazyChunk]:
    """Return the extra states that layers load beside their tensors.

    They hold Transformer Engine's state of FP8, which is None here. All linear layers load one, and
    so do Transformer Engine's norms.
    """
    states: dict[str, LazyChunk] = {}
    for target in targets:
        layer = _EXTRA_STATE.match(target.key)
        if layer is not None:
            index, leading = target.indices or (0,), target.leading or (1,)
            shard = "_".join(".".join(map(str, numbers)) for numbers in (index, leading))
            key = f"{layer[1]}._extra_state/shard_{shard}"
            states.setdefault(key, object_chunk(key, as_object(None)))
    return list(states.values())


def write_iteration(
    partial: ResumableOutput, common: dict[str, Any], chunks: Iterable[LazyChunk], file_bytes: int
) -> None:
    """Write the checkpoint of one iteration, and the tracker file that names it.

    Args:
        partial: the directory of checkpoints.
        common: the common state; its ``iteration`` is the checkpoint's.
        chunks: content of the checkpoint.
        file_bytes: largest size of a file that holds several chunks.
    """
    iteration = common["iteration"]
    path = files.iteration_directory(partial.path, iteration)
    path.mkdir(parents=True, exist_ok=True)
    parts = in_files(chunks, file_bytes)
    parts[0].append(object_chunk(KEY, as_object(common)))
    contents = {f"__0_{number}.distcp": part for number, part in enumerate(parts)}
    spans = {
        name: partial.write(path / name, part, _write_chunk) for name, part in contents.items()
    }
    _write_metadata(path, contents, spans)
    save_config(CheckpointingConfig("torch_dist"), str(path))
    files.write_document(path, {"files": files.checksums(path)})
    files.write_tracker(partial.path, iteration)


def _write_chunk(file: BinaryIO, chunk: LazyChunk) -> None:
    content = chunk.make()
    if isinstance(content, bytes):
        file.write(content)
    else:
        tensor = content.contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save writes the whole storage of a view
        torch.save(tensor.view(chunk.shape), file)


def _write_metadata(
    directory: Path, contents: dict[str, list[LazyChunk]], spans: dict[str, list[Span]]
) -> None:
    """Write torch's description of all chunks and where they are."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results = []
    for name, chunks in contents.items():
        for chunk, (start, length) in zip(chunks, spans[name], strict=True):
            index = MetadataIndex(chunk.key)
            if chunk.dtype is None:
                described[chunk.key] = BytesStorageMetadata()
            else:
                properties = TensorProperties(dtype=chunk.dtype)
                whole = TensorStorageMetadata(properties, torch.Size(chunk.whole), [])
                chunks = described.setdefault(chunk.key, whole).chunks
                index = MetadataIndex(chunk.key, torch.Size(chunk.offset), len(chunks))
                chunks.append(
                    ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
                )
            results.append(WriteResult(index, length, _StorageInfo(name, start, length)))
    FileSystemWriter(directory).finish(Metadata(described), [results])
