"""Writing Megatron-LM's ``torch_dist`` format, one tensor at a time and a file after another."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

from megatron_lowbit.checkpoints.common_state import KEY, as_object
from megatron_lowbit.conversion.plan import Place
from megatron_lowbit.conversion.resumable_output import ResumableOutput, in_files
from megatron_lowbit.storage import files

Span = tuple[int, int]
"""Place of a piece in its file: first byte, number of bytes."""
COMMON = {
    "checkpoint_version": 3.0,
    "num_floating_point_operations_so_far": 0,
    "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
}
"""The common state beside ``args`` and ``iteration`` where a checkpoint holds a model alone."""

_EXTRA_STATE = re.compile(
    r"(.*\b(?:linear_\w+|in_proj|out_proj|output_layer|pre_mlp_layernorm|final_\w+))"
    r"\.(?:weight|bias)\b"
)


class Piece(NamedTuple):
    """A piece of the tensor ``key``, still to be made: of this shape, at this place of the whole.

    Without a dtype it is an object, a pickle that ``make`` returns as it is.
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


def piece_at(
    place: Place, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]
) -> Piece:
    """Return all of a part of a tensor; ``shape`` and what ``make`` gives lack leading axes."""
    lead = tuple(1 for _ in place.index)
    offset = (*place.index, *(0 for _ in shape))
    return Piece(place.key, offset, (*lead, *shape), (*place.of, *shape), dtype, make)


def object_piece(key: str, content: bytes) -> Piece:
    """Return an object, already pickled."""
    return Piece(key, (), (), (), None, lambda: content)


def extra_states(places: Iterable[Place]) -> list[Piece]:
    """Return the objects that layers ask for beside their tensors.

    These hold Transformer Engine's state of FP8, which is None here. All linear layers ask for one,
    and Transformer Engine's norms.
    """
    found: dict[str, Piece] = {}
    for place in places:
        layer = _EXTRA_STATE.match(place.key)
        if layer is not None:
            index, of = place.index or (0,), place.of or (1,)
            shard = "_".join(".".join(map(str, numbers)) for numbers in (index, of))
            key = f"{layer[1]}._extra_state/shard_{shard}"
            found.setdefault(key, object_piece(key, as_object(None)))
    return list(found.values())


def by_size(pieces: Iterable[Piece], most: int) -> dict[str, list[Piece]]:
    """Distribute pieces over files of up to ``most`` bytes, or one larger piece."""
    parts = in_files(pieces, most)
    return {f"__0_{number}.distcp": part for number, part in enumerate(parts)}


def write_iteration(
    partial: ResumableOutput,
    parent: Path,
    common: dict[str, Any],
    contents: dict[str, list[Piece]],
    done: Callable[[], None],
) -> None:
    """Write the checkpoint of one iteration into ``parent``, and the tracker file that names it.

    Args:
        partial: knows the files that are finished already.
        parent: the directory of checkpoints.
        common: the common state; its ``iteration`` is the checkpoint's.
        contents: pieces by file.
        done: called for each piece.
    """
    iteration = common["iteration"]
    path = files.iteration_directory(parent, iteration)
    path.mkdir(parents=True, exist_ok=True)
    first = next(iter(contents))
    contents = contents | {first: [*contents[first], object_piece(KEY, as_object(common))]}
    spans = {}
    for name, pieces in contents.items():
        spans[name] = partial.note(path / name)
        if spans[name] is None:
            spans[name] = _write_file(path / name, pieces, done)
            partial.finish(path / name, spans[name])
        else:
            for _ in pieces:
                done()
    _write_metadata(path, contents, spans)
    save_config(CheckpointingConfig("torch_dist"), str(path))
    files.write_document(path, {"files": files.checksums(path)})
    files.write_tracker(parent, iteration)


def _write_file(path: Path, pieces: Sequence[Piece], done: Callable[[], None]) -> list[Span]:
    spans = []
    with open(path, "wb") as file:
        for piece in pieces:
            start = file.tell()
            made = piece.make()
            if isinstance(made, bytes):
                file.write(made)
            else:
                torch.save(_compact(made).view(piece.shape), file)
            del made
            spans.append((start, file.tell() - start))
            done()
        file.flush()
        os.fsync(file.fileno())
    return spans


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor with memory of its own: torch.save writes all of a shared one."""
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()


def _write_metadata(
    directory: Path, contents: dict[str, list[Piece]], spans: dict[str, list[Span]]
) -> None:
    """Write torch's description of all pieces and where they are."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results = []
    for name, pieces in contents.items():
        for piece, (start, length) in zip(pieces, spans[name], strict=True):
            index = MetadataIndex(piece.key)
            if piece.dtype is None:
                described[piece.key] = BytesStorageMetadata()
            else:
                properties = TensorProperties(dtype=piece.dtype)
                whole = TensorStorageMetadata(properties, torch.Size(piece.whole), [])
                chunks = described.setdefault(piece.key, whole).chunks
                index = MetadataIndex(piece.key, torch.Size(piece.offset), len(chunks))
                chunks.append(
                    ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
                )
            results.append(WriteResult(index, length, _StorageInfo(name, start, length)))
    FileSystemWriter(directory).finish(Metadata(described), [results])
