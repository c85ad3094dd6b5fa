"""Averaging several checkpoints of one run, tensor by tensor."""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial as bind
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron_lowbit.checkpoints.checkpoint import Checkpoint, open_checkpoint
from megatron_lowbit.checkpoints.model_arguments import described_by
from megatron_lowbit.checkpoints.reader import CheckpointReader
from megatron_lowbit.checkpoints.writer import (
    COMMON,
    LazyChunk,
    by_size,
    object_chunk,
    write_iteration,
)
from megatron_lowbit.errors import UserError
from megatron_lowbit.storage import files
from megatron_lowbit.storage.resumable_output import progress, resumable_output

FILE_BYTES = 5 * 10**9


def average(
    source: Path, iterations: Sequence[int], output: Path, force: bool = False
) -> list[int]:
    """Write the mean of a directory's checkpoints of these iterations; return the iterations.

    The mean is of the model alone: ``output`` gets the last one's iteration, for ``--finetune``.
    Sums are FP32 (FP64 of FP64 tensors), results have their tensor's dtype; tensors that are not of
    floating-point numbers are the last one's. Never more than three chunks of one tensor are in
    memory.

    Raises UserError, and leaves nothing, where the checkpoints are not of one model and recipe.
    """
    opened = [open_checkpoint(files.iteration_directory(source, i)) for i in iterations]
    last = opened[-1]
    for other in opened[:-1]:
        _check_alike(other, last)
    chunks = [
        _chunk([checkpoint.tensors for checkpoint in opened], key, chunk)
        for key, entry in last.tensors.model.items()
        for chunk in entry.chunks
    ]
    chunks += [
        object_chunk(key, last.tensors.read_object(key))
        for key in last.tensors.objects
        if key.partition("/")[0].endswith("_extra_state")
    ]
    task = {"task": "average", "source": str(source.absolute()),
            "files": [checkpoint.fingerprint() for checkpoint in opened]}  # fmt: skip
    args = Namespace(**vars(last.tensors.args) | {"no_save_optim": True, "no_save_rng": True})
    kept = {key: last.tensors.common[key] for key in COMMON if key in last.tensors.common}
    common = COMMON | kept | {
        "iteration": iterations[-1], "args": args, "averaged": list(iterations),
    }  # fmt: skip
    with resumable_output(output, force, task) as partial, progress(len(chunks)) as done:
        write_iteration(partial, partial.path, common, by_size(chunks, FILE_BYTES), done)
    return list(iterations)


def _check_alike(one: Checkpoint, other: Checkpoint) -> None:
    """Raise UserError where two checkpoints differ in more than their numbers."""
    described = [
        ("models", described_by(one.tensors.args), described_by(other.tensors.args)),
        ("recipes", _recipes(one), _recipes(other)),
    ]
    for what, mine, theirs in described:
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise UserError(
                    f"{one.path} and {other.path} are of different {what}: {name} is "
                    f"{mine.get(name)!r} and {theirs.get(name)!r}"
                )
    first, second = ({k: (tuple(e.size), e.properties.dtype) for k, e in c.tensors.model.items()}
                     for c in (one, other))  # fmt: skip
    for key in sorted(first.keys() | second.keys()):
        if first.get(key) != second.get(key):
            raise UserError(
                f"{one.path} and {other.path}: {key} is {_shown(first.get(key))} and "
                f"{_shown(second.get(key))}; only tensors of one shape and dtype are averaged"
            )


def _recipes(checkpoint: Checkpoint) -> dict[str, list[str]]:
    return {"precision_recipe": checkpoint.recipes, "recipe_set": checkpoint.recipe_set}


def _shown(entry: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if entry is None else f"{list(entry[0])} {entry[1]}"


def _chunk(sources: Sequence[CheckpointReader], key: str, chunk: ChunkStorageMetadata) -> LazyChunk:
    entry = sources[-1].model[key]
    offset, sizes, dtype = tuple(chunk.offsets), tuple(chunk.sizes), entry.properties.dtype
    make = bind(_mean, sources, key, offset, sizes)
    return LazyChunk(key, offset, sizes, tuple(entry.size), dtype, make)


def _mean(
    sources: Sequence[CheckpointReader], key: str, offset: tuple[int, ...], sizes: tuple[int, ...]
) -> Tensor:
    last = sources[-1].read_part(key, offset, sizes)
    if not last.is_floating_point():
        return last
    total = torch.zeros(sizes, dtype=torch.promote_types(last.dtype, torch.float32))
    for source in sources[:-1]:
        total += source.read_part(key, offset, sizes)
    total += last
    return total.div_(len(sources)).to(last.dtype)
