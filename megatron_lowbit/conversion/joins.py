"""How several tensors of one naming are one tensor of another, both ways, exactly.

All join along the first axis, so that shapes are known before any tensor is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Join:
    """Tensors one below the other; of one, itself. ``rows`` are theirs, the first axis' lengths."""

    rows: tuple[int, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, (sum of rows, ...)."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def split(self, whole: Tensor) -> list[Tensor]:
        """The parts again."""
        return list(whole.split(list(self.rows)))


@dataclass(frozen=True)
class Cut(Join):
    """One tensor whose rows beyond ``rows[0]`` are padding: megatron-core pads vocabularies."""

    def split(self, whole: Tensor) -> list[Tensor]:
        """The rows that count."""
        return [whole[: self.rows[0]]]


@dataclass(frozen=True)
class QueryKeyValue(Join):
    """Query, key and value by groups: for each, its queries' heads, its key, its value."""

    groups: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, as megatron-core's ``linear_qkv`` has it."""
        by_group = [part.unflatten(0, (self.groups, -1)) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Query, key, value."""
        by_group = whole.unflatten(0, (self.groups, -1))
        ends = list(accumulate(rows // self.groups for rows in self.rows))
        starts = [0, *ends[:-1]]
        return [
            by_group[:, start:end].flatten(0, 1)
            for start, end in zip(starts, ends, strict=True)
        ]  # fmt: skip
