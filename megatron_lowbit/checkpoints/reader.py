"""Reader of Megatron-LM's ``torch_dist`` checkpoints: one tensor at a time, and the run's record.

It needs neither a model nor other ranks: the format holds whole tensors in chunks, whatever layout
of ranks wrote them.
"""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_lowbit.checkpoints.model_arguments import model_of
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.json_files import Entries
from megatron_lowbit.megatron.run.common_state import read_common_state
from megatron_lowbit.recipes.record import Record, checked
from megatron_lowbit.storage import files
from megatron_lowbit.storage.pickles import Reader
from megatron_lowbit.storage.selection import persistent

EMBEDDING = "embedding.word_embeddings.weight"
HISTORIES = "amax_history."
"""Start of the keys of amax histories, before a linear layer's path."""
_NORMS = (
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
    (".linear_q_up_proj.layer_norm_", ".q_layernorm."),
    (".linear_kv_up_proj.layer_norm_", ".kv_layernorm."),
)
"""Names of norms as part of the next linear layer, and as modules of their own.

Local layers and Transformer Engine's differ in the name of the norm before experts, and of all
norms in layers with multi-latent attention.
"""


class TensorSlice(NamedTuple):
    """Slice of a tensor of Megatron-LM: ``indices`` in its first axes, of lengths ``leading``."""

    key: str
    indices: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()

    def block(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offset and sizes in the tensor; ``shape`` is the slice's without leading axes."""
        ones, zeros = (1,) * len(self.indices), (0,) * len(shape)
        return (*self.indices, *zeros), (*ones, *shape)


class TensorSource(Protocol):
    """Tensors of Megatron-LM's model, in a checkpoint or in memory."""

    @property
    def path(self) -> Path | str:
        """Name of the source in errors."""

    def dtype(self, target: TensorSlice) -> torch.dtype:
        """Return the dtype of a tensor of the model."""

    def shape(self, target: TensorSlice) -> tuple[int, ...]:
        """Return the shape of a slice, without the leading axes."""

    def read(self, target: TensorSlice) -> Tensor:
        """Read a slice of a tensor of the model, of :meth:`shape`."""


class CheckpointReader:
    """Opened checkpoint: its tensors, read one at a time, and its record of the run.

    Attributes:
        path: the checkpoint's folder.
        files: lengths and checksums by name; None for a checkpoint of stock Megatron-LM.
        model: descriptions of the model's tensors by key.
        state: the same of the optimizer.
        histories: the same of the amax histories of delayed scaling.
        objects: keys of the modules' extra states.
    """

    def __init__(self, path: Path, files: files.Checksums | None = None) -> None:
        self.path, self.files, self._reader = path, files, Reader(path)
        metadata = self._reader.read_metadata()
        self._places = metadata.storage_data
        self.model: dict[str, TensorStorageMetadata] = {}
        self.state: dict[str, TensorStorageMetadata] = {}
        self.histories: dict[str, TensorStorageMetadata] = {}
        self.objects: list[str] = []
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                self.objects.append(key)
            elif key.startswith(HISTORIES):
                self.histories[key] = entry
            else:
                of_optimizer = key.startswith(("optimizer.", "chained_"))
                (self.state if of_optimizer else self.model)[key] = entry

    @cached_property
    def common(self) -> dict[str, Any]:
        """The common state: ``args``, ``iteration`` and what else is no tensor."""
        return read_common_state(self.path)

    @property
    def args(self) -> Namespace:
        """The arguments of the run that saved the checkpoint."""
        args = self.common.get("args")
        if not isinstance(args, Namespace):
            raise UserError(f"{self.path}: holds no arguments of its run")
        return args

    @property
    def _arguments(self) -> Entries:
        return Entries(vars(self.args), f"{self.path}: arguments")

    @property
    def iteration(self) -> int:
        """Number of iterations after which it was saved."""
        iteration: int = self.common.get("iteration", 0)
        return iteration

    @property
    def recipes(self) -> list[str]:
        """Names of the recipes of training; none where it had none."""
        return self._arguments.strings("precision_recipe")

    @property
    def recipe_set(self) -> list[str]:
        """Changes of these recipes' fields."""
        return self._arguments.strings("recipe_set")

    @property
    def recipe_record(self) -> Record | None:
        """Text of the recipe of training, see ``recipes.record``; None in older checkpoints."""
        record = getattr(self.args, "recipe_record", None)
        return None if record is None else checked(record, f"{self.path}: recipe_record")

    @property
    def data_record(self) -> dict[str, str]:
        """Digests of the data sets of training by prefix; none in older checkpoints."""
        record = getattr(self.args, "data_record", None) or {}
        entries = Entries(record, f"{self.path}: data_record")
        return {prefix: entries.string(prefix) for prefix in entries}

    def model_arguments(self, vocab_size: int | None = None) -> dict[str, Any]:
        """Return the arguments that describe the model.

        ``vocab_size``: rows of the vocabulary that stand for tokens; None for those that training
        was told, or else all.
        """
        entry: Any = self.model.get(EMBEDDING)
        require(entry is not None, f"{self.path}: no tensor {EMBEDDING}")
        rows = entry.size[0]
        require(
            vocab_size is None or 0 < vocab_size <= rows,
            f"--vocab-size {vocab_size}: the vocabulary of {self.path} has {rows} rows",
        )
        told = self._arguments.integer("vocab_size", rows)
        return model_of(self.args, vocab_size or min(told, rows))

    def fingerprint(self) -> dict[str, Any]:
        """Return the lengths and times of the files, as JSON; they change with the checkpoint."""
        stats = {path.name: path.stat() for path in sorted(self.path.iterdir())}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}

    def check(self, targets: Iterable[TensorSlice]) -> None:
        """Raise UserError where these are not slices of exactly the model's tensors.

        A tensor with another number of layers or experts is refused, too.
        """
        leading = {target.key: target.leading for target in targets}
        keys = leading.keys()
        if missing := sorted(key for key in keys if self._stored(key) is None):
            raise UserError(f"{self.path}: no tensor {missing[0]} ({len(missing)} are missing)")
        if unknown := sorted(self.model.keys() - keys - {other_name(key) for key in keys}):
            raise UserError(
                f"{self.path}: tensor {unknown[0]} has no place in the family ({len(unknown)} such)"
            )
        for key, lengths in leading.items():
            size = tuple(self._entry(key).size)
            require(
                size[: len(lengths)] == lengths,
                f"{self.path}: {key} is {list(size)}, which is not the model's: its first axes "
                f"should be {list(lengths)}",
            )

    def dtype(self, target: TensorSlice) -> torch.dtype:
        """Return the dtype of a tensor of the model."""
        dtype: torch.dtype = self._entry(target.key).properties.dtype
        return dtype

    def shape(self, target: TensorSlice) -> tuple[int, ...]:
        """Return the shape of a slice, without the leading axes."""
        return tuple(self._entry(target.key).size)[len(target.indices) :]

    def read(self, target: TensorSlice) -> Tensor:
        """Read a slice of a tensor of the model, of :meth:`shape`."""
        shape = self.shape(target)
        return self.read_part(target.key, *target.block(shape)).view(shape)

    def read_part(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a block of a tensor from its chunks: ``sizes`` entries from ``offset`` on."""
        key = self._stored(key) or key
        entry = self._entry(key)
        block = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [block])
        if sum(item.lengths.numel() for item in items) != block.sizes.numel():
            raise UserError(f"{self.path}: {key}: chunks are missing, or overlap")
        target = torch.empty(block.sizes, dtype=entry.properties.dtype)
        for item in items:
            stored = self._read_chunk(entry, item.storage_index)
            if item.lengths == block.sizes == stored.shape:
                return stored
            into = narrow_tensor_by_index(target, item.dest_offsets, item.lengths)
            into.copy_(narrow_tensor_by_index(stored, item.storage_offsets, item.lengths))
        return target

    def _read_chunk(self, entry: TensorStorageMetadata, index: MetadataIndex) -> Tensor:
        """Read a stored chunk; raise UserError where it is not of the described shape and dtype."""
        stored = self._reader.read_tensor(self._places[index])
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        alike = (
            isinstance(stored, Tensor)
            and stored.layout is torch.strided
            and (stored.shape, stored.dtype) == (sizes, entry.properties.dtype)
        )
        require(alike, f"{self.path}: {index.fqn}: its file holds no tensor of {list(sizes)}")
        return stored

    def read_object(self, key: str) -> bytes:
        """Return a pickle as it is in its file, not opened."""
        return self._reader.read_bytes(self._places[MetadataIndex(key)])

    def _stored(self, key: str) -> str | None:
        """Return the key that a tensor of the model has in this checkpoint."""
        return next((name for name in (key, other_name(key)) if name in self.model), None)

    def _entry(self, key: str) -> TensorStorageMetadata:
        stored = self._stored(key)
        return self.model[stored] if stored else self.histories[key]


def other_name(key: str) -> str:
    """Return the key that a norm has as a module of its own; other keys as they are."""
    for fused, module in _NORMS:
        key = key.replace(fused, module)
    return key


def open_checkpoint(source: Path, check: bool = True) -> CheckpointReader:
    """Open the newest checkpoint of a ``--save`` directory, or one of its iterations' folders.

    ``check``: compare its files with the checksums on record. Raises UserError where there is no
    checkpoint, or one of its files has changed since it was saved.
    """
    # A --save directory may hold a .metadata by accident.
    is_directory = (source / files.TRACKER).exists() or files.iterations(source)
    is_iteration = (source / files.METADATA).is_file() and not is_directory
    path = source if is_iteration else _newest(source)
    recorded = files.recorded_files(path)
    if check:
        files.check_files(path, recorded or {}, recorded or ())
    return CheckpointReader(path, recorded)


def _newest(source: Path) -> Path:
    """Return the folder that a directory's tracker file names."""
    saved = persistent(Namespace(ckpt_step=None), source)
    if saved is None:
        held = [files.iteration_directory(source, each).name for each in files.iterations(source)]
        named = f"name one of its iterations: {', '.join(held[-5:])}" if held else (
            f"neither a checkpoint directory, with {files.TRACKER}, nor one of its iterations, "
            "with .metadata"
        )  # fmt: skip
        raise UserError(f"{source}: {named}")
    return saved.path


def chosen_iterations(source: Path, last: int | None, named: Sequence[int]) -> list[int]:
    """Return the ``last`` complete checkpoints, or the named ones; UserError for missing ones.

    Checkpoints above the last saved one are from before the run went back. ``last`` ignores them,
    and prints their iterations.
    """
    complete = files.complete_iterations(source)
    if missing := sorted(set(named) - set(complete)):
        raise UserError(
            f"{source}: no complete checkpoint of iteration {missing[0]} "
            f"(complete: {', '.join(map(str, complete)) or 'none'})"
        )
    if named:
        return sorted(set(named))
    limits = files.latest_iteration(source), files.last_saved(source)
    newest = min((limit for limit in limits if limit is not None), default=0)
    current = [iteration for iteration in complete if iteration <= newest]
    if last is None or not 1 <= last <= len(current):
        raise UserError(
            f"{source}: --last {last}: it holds {len(current)} complete checkpoints up to "
            f"iteration {newest}, the last saved"
        )
    if ignored := complete[len(current) :]:
        numbers = ", ".join(map(str, ignored))
        say(f"{source}: ignored {numbers}, which are above {newest}, the last saved iteration")
    return current[-last:]
