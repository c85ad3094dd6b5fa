"""Writer of Megatron-LM's ``torch_dist`` checkpoints, tensor by tensor; the mean of several."""

import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial as bind
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

from megatron_lowbit.checkpoints.model_arguments import described_by
from megatron_lowbit.checkpoints.reader import CheckpointReader, TensorSlice, open_checkpoint
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.megatron.run.common_state import KEY, as_object
from megatron_lowbit.recipes.record import difference
from megatron_lowbit.storage import files
from megatron_lowbit.storage.resumable_output import (
    ResumableOutput,
    Span,
    in_files,
    resumable_output,
)

COMMON = {
    "checkpoint_version": 3.0,
    "num_floating_point_operations_so_far": 0,
    "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
}
"""Common state, besides ``args`` and ``iteration``, of a checkpoint that holds only a model."""

_EXTRA_STATE = re.compile(
    r"(.*\b(?:linear_\w+|in_proj|out_proj|output_layer|\w+_layernorm|final_norm))"
    r"\.(?:weight|bias)\b"
)


class LazyChunk(NamedTuple):
    """Chunk of the tensor ``key`` that ``make`` returns on demand.

    ``shape`` is the chunk's, at ``offset`` of a tensor of shape ``size``; the tensor of ``make``
    may lack leading axes of length 1. Without a dtype it is an object, a pickle in bytes.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    size: tuple[int, ...]
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
    """Return the extra states that layers load in addition to their tensors.

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

    ``partial`` is the directory of checkpoints; the ``common`` state gives the iteration. Files of
    several chunks have up to ``file_bytes``.
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
                empty = TensorStorageMetadata(properties, torch.Size(chunk.size), [])
                chunks = described.setdefault(chunk.key, empty).chunks
                index = MetadataIndex(chunk.key, torch.Size(chunk.offset), len(chunks))
                chunks.append(
                    ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
                )
            results.append(WriteResult(index, length, _StorageInfo(name, start, length)))
    FileSystemWriter(directory).finish(Metadata(described), [results])


def average(source: Path, iterations: Sequence[int], output: Path, force: bool = False) -> None:
    """Write the mean of a directory's checkpoints of these iterations.

    ``output`` gets the averaged model under the last iteration's number, for ``--finetune``; it has
    no optimizer state. Sums are FP32 (FP64 for FP64 tensors), results have their tensor's dtype.
    Tensors of integers are copied from the last checkpoint. At most three chunks are in memory.

    Raises UserError, and leaves nothing, where the checkpoints have different models or recipes.
    """
    sources = [open_checkpoint(files.iteration_directory(source, i)) for i in iterations]
    last = sources[-1]
    for other in sources[:-1]:
        _check_alike(other, last)
    chunks = [
        LazyChunk(key, chunk.offsets, chunk.sizes, entry.size, entry.properties.dtype,
                  bind(_mean, sources, key, chunk))
        for key, entry in last.model.items()
        for chunk in entry.chunks
    ]  # fmt: skip
    chunks += [
        object_chunk(key, last.read_object(key))
        for key in last.objects
        if key.partition("/")[0].endswith("_extra_state")
    ]
    task = {"task": "average", "source": str(source.absolute()),
            "files": [checkpoint.fingerprint() for checkpoint in sources]}  # fmt: skip
    args = Namespace(**vars(last.args) | {"no_save_optim": True, "no_save_rng": True})
    carried = {key: last.common[key] for key in COMMON if key in last.common}
    common = COMMON | carried | {
        "iteration": iterations[-1], "args": args, "averaged": list(iterations),
    }  # fmt: skip
    with resumable_output(output, force, task, len(chunks)) as partial:
        write_iteration(partial, common, chunks, file_bytes=5 * 10**9)


def _check_alike(first: CheckpointReader, last: CheckpointReader) -> None:
    """Raise UserError where two checkpoints differ in more than their values."""
    pair, paths = (first, last), f"{first.path} and {last.path}"
    recipes: list[dict[str, Any]] = [
        {"precision_recipe": c.recipes, "recipe_set": c.recipe_set} for c in pair
    ]
    if first.recipe_record is not None and last.recipe_record is not None:
        recipes = [{}, {}]
        if text := difference(first.recipe_record, last.recipe_record):
            raise UserError(f"{paths} are of different recipes: {text}")
    for sort, (mine, theirs) in (
        ("models", [described_by(checkpoint.args) for checkpoint in pair]),
        ("recipes", recipes),
    ):
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                text = f"{name} is {mine.get(name)!r} and {theirs.get(name)!r}"
                raise UserError(f"{paths} are of different {sort}: {text}")
    before, after = (
        {k: f"{list(e.size)} {e.properties.dtype}" for k, e in checkpoint.model.items()}
        for checkpoint in pair
    )
    for key in sorted(before.keys() | after.keys()):
        tensors = before.get(key, "absent"), after.get(key, "absent")
        require(
            tensors[0] == tensors[1],
            f"{paths}: {key} is {tensors[0]} and {tensors[1]}; only "
            "tensors of one shape and dtype are averaged",
        )


def _mean(sources: Sequence[CheckpointReader], key: str, chunk: ChunkStorageMetadata) -> Tensor:
    last = sources[-1].read_part(key, chunk.offsets, chunk.sizes)
    if not last.is_floating_point():
        return last
    total = torch.zeros(chunk.sizes, dtype=torch.promote_types(last.dtype, torch.float32))
    for source in sources[:-1]:
        total += source.read_part(key, chunk.offsets, chunk.sizes)
    total += last
    return total.div_(len(sources)).to(last.dtype)
