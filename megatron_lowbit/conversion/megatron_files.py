"""A checkpoint's tensors in megatron-core's ``torch_dist`` format, read one at a time.

Without a model and without other ranks: the format holds whole tensors, in pieces, whatever layout
wrote them, and any layout reads them.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_lowbit.conversion.plan import Place
from megatron_lowbit.errors import UserError
from megatron_lowbit.training.checkpoint_pickle import Reader


class Tensors:
    """A checkpoint's tensors, to read.

    ``model`` and ``state`` are their descriptions by key: of the model, and of optimizer and
    recipe. ``objects`` are the keys of what modules keep beside tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._reader = path, Reader(path)
        try:
            metadata = self._reader.read_metadata()
        except OSError as error:
            raise UserError(f"{path / '.metadata'}: cannot be read ({error.strerror})") from None
        self.places = metadata.storage_data
        self.model: dict[str, TensorStorageMetadata] = {}
        self.state: dict[str, TensorStorageMetadata] = {}
        self.objects: list[str] = []
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                self.objects.append(key)
            else:
                (self.state if _is_state(key) else self.model)[key] = entry

    def check(self, places: Iterable[Place]) -> None:
        """Raise UserError where the keys of these places are not all there are, or fewer."""
        keys = {place.key for place in places}
        if missing := sorted(keys - self.model.keys()):
            raise UserError(f"{self.path}: no tensor {missing[0]} ({len(missing)} are missing)")
        if unknown := sorted(self.model.keys() - keys):
            raise UserError(
                f"{self.path}: tensor {unknown[0]} has no place in the family ({len(unknown)} such)"
            )

    def dtype(self, place: Place) -> torch.dtype:
        """Of a tensor of the model."""
        return self.model[place.key].properties.dtype

    def shape(self, place: Place) -> tuple[int, ...]:
        """Of a part of the model's, without the leading axes that it is chosen from."""
        return tuple(self.model[place.key].size)[len(place.index) :]

    def read(self, place: Place) -> Tensor:
        """A part of the model's, of :meth:`shape`."""
        rest = self.shape(place)
        offset, lead = (*place.index, *(0 for _ in rest)), (1 for _ in place.index)
        return self.read_part(place.key, offset, (*lead, *rest)).view(rest)

    def read_part(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """What a tensor has from ``offset`` on, of shape ``sizes``, out of the pieces it is in."""
        entry = self.model.get(key) or self.state[key]
        target, filled = None, 0
        for chunk in entry.chunks:
            common = _common(chunk, offset, sizes)
            if common is None:
                continue
            piece = self._reader.read_tensor(self.places[MetadataIndex(key, chunk.offsets)])
            if (tuple(chunk.offsets), tuple(chunk.sizes)) == (tuple(offset), tuple(sizes)):
                return piece
            if target is None:
                target = torch.empty(tuple(sizes), dtype=entry.properties.dtype)
            for_target, for_piece = common
            target[for_target] = piece[for_piece]
            filled += target[for_target].numel()
        if target is None or filled != math.prod(sizes):
            raise UserError(f"{self.path}: {key}: pieces are missing, or overlap")
        return target

    def read_object(self, key: str) -> bytes:
        """A pickle as it is in its file, not opened."""
        info = self.places[MetadataIndex(key)]
        with open(self.path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return file.read(info.length)


def _is_state(key: str) -> bool:
    """Whether a key is of an optimizer or of a recipe, not of the model."""
    return key.startswith(("optimizer.", "amax_history"))


def _common(
    chunk: ChunkStorageMetadata, offset: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a chunk and a part overlap, seen from the part and from the chunk; None if nowhere."""
    seen_from_part, seen_from_chunk = [], []
    for theirs, length, ours, size in zip(chunk.offsets, chunk.sizes, offset, sizes, strict=True):
        start, end = max(theirs, ours), min(theirs + length, ours + size)
        if start >= end:
            return None
        seen_from_part.append(slice(start - ours, end - ours))
        seen_from_chunk.append(slice(start - theirs, end - theirs))
    return tuple(seen_from_part), tuple(seen_from_chunk)
