"""A checkpoint cut as a run of another tensor- and pipeline-parallel layout would write it.

megatron-core loads a checkpoint in any layout as it is. Cut for its layout, each rank reads its own
pieces alone, from its own files.
"""

import re
from collections.abc import Iterator
from functools import partial as bind
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lowbit.conversion.checkpoints import open_checkpoint
from megatron_lowbit.conversion.megatron_files import Tensors
from megatron_lowbit.conversion.megatron_writer import Piece, write_iteration
from megatron_lowbit.conversion.partial import progress, whole
from megatron_lowbit.errors import require

_ROWS = re.compile(
    r"(word_embeddings|output_layer|linear_qkv|linear_fc1|linear_q\w*_up_proj)\.(weight|bias)"
)
_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight")
_GATED = re.compile(r"linear_fc1\.(weight|bias)")
_EXPERTS = "experts.experts."
_LAYER = re.compile(r"decoder\.layers\.(\d+\.)?")


def reshard(source: Path, output: Path, tensor: int, pipeline: int, force: bool = False) -> Path:
    """Write a checkpoint anew, in the pieces of ``tensor`` x ``pipeline`` ranks; return its folder.

    ``source`` is a ``--save`` directory, of which it takes the newest checkpoint, or one of its
    iterations. All tensors keep their bits, those of the optimizer too. One piece is in memory at a
    time, and what it is read from.

    Raises UserError, and leaves nothing, where the model cannot be split like that.
    """
    checkpoint = open_checkpoint(source)
    model, tensors = checkpoint.model, checkpoint.tensors
    name = str(checkpoint.path)
    require("hybrid_override_pattern" not in model, f"{name}: hybrid models cannot be cut anew")
    require(tensor > 0, f"--tensor-model-parallel-size {tensor}: at least 1")
    require(pipeline > 0, f"--pipeline-model-parallel-size {pipeline}: at least 1")
    for key, parts, option in (("num_layers", pipeline, "pipeline"),
                               ("num_query_groups", tensor, "tensor")):  # fmt: skip
        require(
            model[key] % parts == 0,
            f"--{option}-model-parallel-size {parts}: {name} has {key} {model[key]}, no multiple",
        )
    contents: dict[str, list[Piece]] = {
        f"__{rank}_0.distcp": [] for rank in range(tensor * pipeline)
    }
    entries = tensors.model | tensors.state
    for key, entry in entries.items():
        for rank, piece in _pieces(tensors, key, entry, model, tensor, pipeline):
            contents[f"__{rank}_0.distcp"].append(piece)
    for key in tensors.objects:
        make = bind(tensors.read_object, key)
        contents["__0_0.distcp"].append(Piece(key, (), (), (), None, make))
    contents = {name: pieces for name, pieces in contents.items() if pieces}
    document = {key: checkpoint.document[key]
                for key in ("iteration", "optimizer", "scheduler", "state")}  # fmt: skip
    common = (checkpoint.path / "common.pt").read_bytes()
    task = {"task": "reshard", "files": checkpoint.document["files"], "layout": [tensor, pipeline]}
    total = sum(map(len, contents.values()))
    with whole(output, force, task) as partial, progress(total) as done:
        write_iteration(partial, partial.path, document, common, contents, done)
    return output


def _pieces(
    tensors: Tensors,
    key: str,
    entry: TensorStorageMetadata,
    model: dict[str, Any],
    tensor: int,
    pipeline: int,
) -> Iterator[tuple[int, Piece]]:
    """(rank, piece) of all of a tensor; ranks count tensor parallelism first."""
    size = tuple(entry.size)
    lead = _leading_axes(key)
    for index in _indices(size[:lead]):
        stage = _stage(key, index, model, pipeline)
        for part, (offset, sizes) in _cuts(key, size[lead:], model, tensor):
            offset, sizes = (*index, *offset), (*(1 for _ in index), *sizes)
            make = bind(tensors.read_part, key, offset, sizes)
            found = Piece(key, offset, sizes, size, entry.properties.dtype, make)
            yield stage * tensor + part, found


def _leading_axes(key: str) -> int:
    """How many axes count layers and experts."""
    found = None if key.startswith("amax_history") else _LAYER.search(key)
    by_layer = found is not None and found[1] is None
    return by_layer + (_EXPERTS in key)


def _indices(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All places on the leading axes."""
    if not lengths:
        yield ()
        return
    for first in range(lengths[0]):
        for rest in _indices(lengths[1:]):
            yield (first, *rest)


def _stage(key: str, index: tuple[int, ...], model: dict[str, Any], pipeline: int) -> int:
    found = _LAYER.search(key)
    if found is not None:
        layer = int(found[1][:-1]) if found[1] else index[0]
        return layer * pipeline // model["num_layers"]
    return pipeline - 1 if "final_layernorm" in key or "output_layer" in key else 0


def _cuts(
    key: str, shape: tuple[int, ...], model: dict[str, Any], tensor: int
) -> Iterator[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """(tensor-parallel rank, (offset, sizes)) of all of one layer's part of a tensor."""
    axis = 0 if _ROWS.search(key) else 1 if _COLUMNS.search(key) else None
    if axis is None or key.startswith("amax_history"):
        yield 0, (tuple(0 for _ in shape), shape)
        return
    # Gate and up stand one below the other: each rank has a part of both.
    halves = 2 if model["swiglu"] and _GATED.search(key) else 1
    length = shape[axis] // halves
    is_vocabulary = "embedding" in key or "output_layer" in key
    require(
        is_vocabulary or length % tensor == 0,
        f"--tensor-model-parallel-size {tensor}: {key} has {length} "
        f"{('rows', 'columns')[axis]}, no multiple",
    )
    step = -(-length // tensor)
    edges = [min(rank * step, length) for rank in range(tensor + 1)]
    for half in range(halves):
        for rank, (start, end) in enumerate(pairwise(edges)):
            if end > start:
                offset, sizes = [0] * len(shape), list(shape)
                offset[axis], sizes[axis] = half * length + start, end - start
                yield rank, (tuple(offset), tuple(sizes))
