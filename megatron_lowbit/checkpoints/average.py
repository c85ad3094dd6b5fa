"""Averaging several checkpoints of one run, tensor by tensor."""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron_lowbit.checkpoints.model_arguments import described_by
from megatron_lowbit.checkpoints.reader import CheckpointReader, open_checkpoint
from megatron_lowbit.checkpoints.writer import COMMON, LazyChunk, object_chunk, write_iteration
from megatron_lowbit.errors import UserError, require
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
        write_iteration(partial, common, chunks, FILE_BYTES)


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
    for what, (mine, theirs) in (
        ("models", [described_by(checkpoint.args) for checkpoint in pair]),
        ("recipes", recipes),
    ):
        for name in sorted(mine.keys() | theirs.keys()):
            values = mine.get(name), theirs.get(name)
            text = f"{name} is {values[0]!r} and {values[1]!r}"
            require(values[0] == values[1], f"{paths} are of different {what}: {text}")
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
