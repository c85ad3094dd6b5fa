"""A checkpoint's tensors in megatron-core's ``torch_dist`` format, read and written one at a time.

Without a model and without other ranks: the format holds whole tensors, in pieces, whatever layout
wrote them, and any layout reads them.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_lowbit.conversion.plan import Place
from megatron_lowbit.errors import UserError
from megatron_lowbit.training.checkpoint_pickle import Reader


class Tensors:
    """The model's tensors of a checkpoint directory, to read."""

    def __init__(self, path: Path) -> None:
        self.path, self._reader = path, Reader(path)
        self._metadata: Metadata = self._reader.read_metadata()
        self._found = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not _is_state(key)
        }

    def check(self, places: Iterable[Place]) -> None:
        """Raise UserError where the keys of these places are not all there are, or fewer."""
        keys = {place.key for place in places}
        if missing := sorted(keys - self._found.keys()):
            raise UserError(f"{self.path}: no tensor {missing[0]} ({len(missing)} are missing)")
        if unknown := sorted(self._found.keys() - keys):
            raise UserError(
                f"{self.path}: tensor {unknown[0]} has no place in the family ({len(unknown)} such)"
            )

    def dtype(self, place: Place) -> torch.dtype:
        """Of a tensor."""
        return self._found[place.key].properties.dtype

    def read(self, place: Place) -> Tensor:
        """A part of a tensor, without the leading axes that it is chosen from."""
        entry = self._found[place.key]
        lead = len(place.index)
        offsets = torch.Size((*place.index, *(0 for _ in entry.size[lead:])))
        sizes = torch.Size((*(1 for _ in place.index), *entry.size[lead:]))
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        items = create_read_items_for_chunk_list(place.key, entry, [chunk])
        planner = _Target(target)
        planner.set_up_planner({}, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._reader.read_data(LoadPlan(items), planner).wait()
        return target.view(entry.size[lead:])


def _is_state(key: str) -> bool:
    """Whether a key is of an optimizer or of a recipe, not of the model."""
    return key.startswith(("optimizer.", "amax_history"))


class _Target(LoadPlanner):
    """Reads one chunk into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False):
        """Nothing to set up."""

    def create_local_plan(self) -> LoadPlan:
        """Made by who reads."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As it is."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Tensors only are read."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that a piece fills."""
        part = self._target
        for axis, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was read in place."""


class Piece(NamedTuple):
    """A part of a tensor that is still to be made, of this shape without leading axes."""

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write(directory: Path, pieces: Sequence[Piece], done: Callable[[Piece], None]) -> None:
    """Write the tensors into an empty directory, made and written one after another."""
    writer = torch_checkpoint.FileSystemWriter(directory, thread_count=1)
    planner = _Makers(pieces, done)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    [plan] = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class _Makers(SavePlanner):
    """A plan of tensors that do not exist yet."""

    def __init__(self, pieces: Sequence[Piece], done: Callable[[Piece], None]) -> None:
        self._pieces = {_index(piece): piece for piece in pieces}
        self._done = done

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator=False):
        """Nothing to set up."""

    def create_local_plan(self) -> SavePlan:
        """All pieces."""
        return SavePlan([_write_item(piece) for piece in self._pieces.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """With the description of whole tensors."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Make a tensor, now that it is to be written."""
        piece = self._pieces[write_item.index.fqn, tuple(write_item.index.offset)]
        tensor = piece.make()
        self._done(piece)
        return tensor.view(*(1 for _ in piece.place.index), *piece.shape)


def _index(piece: Piece) -> tuple[str, tuple[int, ...]]:
    return piece.place.key, (*piece.place.index, *(0 for _ in piece.shape))


def _write_item(piece: Piece) -> WriteItem:
    key, offset = _index(piece)
    sizes = torch.Size((*(1 for _ in piece.place.index), *piece.shape))
    chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=sizes)
    properties = TensorProperties(dtype=piece.dtype)
    size = torch.Size((*piece.place.of, *piece.shape))
    data = TensorWriteData(chunk=chunk, properties=properties, size=size)
    return WriteItem(MetadataIndex(key, torch.Size(offset)), WriteItemType.SHARD, tensor_data=data)
