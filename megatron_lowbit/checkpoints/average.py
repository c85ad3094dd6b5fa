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
from megatron_lowbit.checkpoints.writer import COMMON, LazyChunk, object_chunk, write_iteration
from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes.record import difference
from megatron_lowbit.storage import files
from megatron_lowbit.storage.resumable_output import resumable_output

FILE_BYTES = 5 * 10**9


def average(source: Path, iterations: Sequence[int], output: Path, force: bool = False) -> None:
    """Write the mean of a directory's checkpoints of these iterations.

    ``output`` gets the averaged model under the last iteration's number, for ``--finetune``; it has
    no optimizer state. Sums are FP32 (FP64 for FP64 tensors), results have their tensor's dtype.
    Tensors of integers are copied from the last checkpoint. At most three chunks are in memory.

    Raises UserError, and leaves nothing, where the checkpoints have different models or recipes.
    """
    opened = [open_checkpoint(files.iteration_directory(source, i)) for i in iterations]
    last = opened[-1]
    for other in opened[:-1]:
        _check_alike(other, last)
    sources = [checkpoint.tensors for checkpoint in opened]
    chunks = [
        LazyChunk(key, chunk.offsets, chunk.sizes, entry.size, entry.properties.dtype,
                  bind(_mean, sources, key, chunk))
        for key, entry in last.tensors.model.items()
        for chunk in entry.chunks
    ]  # fmt: skip
    chunks += [
        object_chunk(key, last.tensors.read_object(key))
        for key in last.tensors.objects
        if key.partition("/")[0].endswith("_extra_state")
    ]
    task = {"task": "average", "source": str(source.absolute()),
            "files": [checkpoint.fingerprint() for checkpoint in opened]}  # fmt: skip
    args = Namespace(**vars(last.tensors.args) | {"no_save_optim": True, "no_save_rng": True})
    carried = {key: last.tensors.common[key] for key in COMMON if key in last.tensors.common}
    common = COMMON | carried | {
        "iteration": iterations[-1], "args": args, "averaged": list(iterations),
    }  # fmt: skip
    with resumable_output(output, force, task, len(chunks)) as partial:
        write_iteration(partial, common, chunks, FILE_BYTES)


def _check_alike(first: Checkpoint, last: Checkpoint) -> None:
    """Raise UserError where two checkpoints differ in more than their values."""
    pair = (first, last)
    models = [described_by(checkpoint.tensors.args) for checkpoint in pair]
    recipes = [{"precision_recipe": c.recipes, "recipe_set": c.recipe_set} for c in pair]
    if first.recipe_record is not None and last.recipe_record is not None:
        recipes = [{}, {}]
        if text := difference(first.recipe_record, last.recipe_record):
            raise UserError(f"{first.path} and {last.path} are of different recipes: {text}")
    for kind, (mine, theirs) in (("models", models), ("recipes", recipes)):
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise UserError(
                    f"{first.path} and {last.path} are of different {kind}: {name} is "
                    f"{mine.get(name)!r} and {theirs.get(name)!r}"
                )
    before, after = (
        {k: f"{list(e.size)} {e.properties.dtype}" for k, e in checkpoint.tensors.model.items()}
        for checkpoint in pair
    )
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            raise UserError(
                f"{first.path} and {last.path}: {key} is {before.get(key, 'absent')} and "
                f"{after.get(key, 'absent')}; only tensors of one shape and dtype are averaged"
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
