"""A checkpoint of Megatron-LM in its ``torch_dist`` format: tensors read one at a time, and args.

Without a model and without other ranks: the format holds whole tensors, in pieces, whatever layout
wrote them, and any layout reads them.
"""

import math
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_lowbit.checkpoints.common_state import read_common_state
from megatron_lowbit.conversion.plan import Place
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.storage.pickles import Reader

_HISTORIES = "amax_history."
_STATES = ("optimizer.", "chained_")
"""Starts of the keys of optimizers' tensors."""
NORM_BEFORE_EXPERTS = (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")
"""Names of the norm before a layer's experts: of local layers, and of Transformer Engine's."""


class Tensors:
    """Tensors of a checkpoint, to read.

    Attributes:
        path: the checkpoint's folder.
        places: where each tensor's pieces and each object are.
        model: descriptions of the model's tensors by key.
        state: the same of the optimizer.
        histories: the same of the amax histories of delayed scaling.
        objects: keys of what modules keep beside tensors.
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
        self.histories: dict[str, TensorStorageMetadata] = {}
        self.objects: list[str] = []
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                self.objects.append(key)
            elif key.startswith(_HISTORIES):
                self.histories[key] = entry
            else:
                (self.state if key.startswith(_STATES) else self.model)[key] = entry

    @cached_property
    def common(self) -> dict[str, Any]:
        """The common state: ``args``, ``iteration`` and what else is no tensor."""
        return read_common_state(self.path)

    @property
    def args(self) -> Namespace:
        """The arguments of the run that saved the checkpoint."""
        args = self.common.get("args")
        require(isinstance(args, Namespace), f"{self.path}: holds no arguments of its run")
        return args

    def check(self, places: Iterable[Place]) -> None:
        """Raise UserError where the keys of these places are not all there are, or fewer.

        So it is where a tensor has other numbers of layers or experts than its place.
        """
        leading = {place.key: place.of for place in places}
        keys = leading.keys()
        if missing := sorted(key for key in keys if self._stored(key) is None):
            raise UserError(f"{self.path}: no tensor {missing[0]} ({len(missing)} are missing)")
        if unknown := sorted(self.model.keys() - keys - {_twin(key) for key in keys}):
            raise UserError(
                f"{self.path}: tensor {unknown[0]} has no place in the family ({len(unknown)} such)"
            )
        for key, of in leading.items():
            size = tuple(self._entry(key).size)
            require(
                size[: len(of)] == of,
                f"{self.path}: {key} is {list(size)}, which is not the model's: its first axes "
                f"should be {list(of)}",
            )

    def dtype(self, place: Place) -> torch.dtype:
        """Return the dtype of a tensor of the model."""
        return self._entry(place.key).properties.dtype

    def shape(self, place: Place) -> tuple[int, ...]:
        """Return the shape of a part, without the leading axes that it is chosen from."""
        return tuple(self._entry(place.key).size)[len(place.index) :]

    def read(self, place: Place) -> Tensor:
        """Read a part of the model, of :meth:`shape`."""
        rest = self.shape(place)
        offset, lead = (*place.index, *(0 for _ in rest)), (1 for _ in place.index)
        return self.read_part(place.key, offset, (*lead, *rest)).view(rest)

    def read_part(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read ``sizes`` entries of a tensor from ``offset`` on, out of its pieces."""
        key = self._stored(key) or key
        entry = self._entry(key)
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
        """Return a pickle as it is in its file, not opened."""
        info = self.places[MetadataIndex(key)]
        with open(self.path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return file.read(info.length)

    def _stored(self, key: str) -> str | None:
        """Return the key that a tensor of the model has in this checkpoint."""
        return next((name for name in (key, _twin(key)) if name in self.model), None)

    def _entry(self, key: str) -> TensorStorageMetadata:
        stored = self._stored(key)
        return self.model[stored] if stored else (self.state | self.histories)[key]


def _twin(key: str) -> str:
    """Return what layers of Transformer Engine call a tensor of local layers."""
    return key.replace(*NORM_BEFORE_EXPERTS)


def _common(
    chunk: ChunkStorageMetadata, offset: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where a chunk and a part overlap, in each one's indices; None if nowhere."""
    seen_from_part, seen_from_chunk = [], []
    for theirs, length, ours, size in zip(chunk.offsets, chunk.sizes, offset, sizes, strict=True):
        start, end = max(theirs, ours), min(theirs + length, ours + size)
        if start >= end:
            return None
        seen_from_part.append(slice(start - ours, end - ours))
        seen_from_chunk.append(slice(start - theirs, end - theirs))
    return tuple(seen_from_part), tuple(seen_from_chunk)
