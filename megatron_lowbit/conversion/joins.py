"""How several tensors of one naming are one tensor of another, both ways, exactly.

Shapes follow from shapes, so that they are known before any tensor is read.
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

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Of the whole, from those of the parts."""
        return sum(part[0] for part in parts), *parts[0][1:]

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


@dataclass(frozen=True)
class Stacked(Join):
    """One tensor that holds the parts of another join, one below the other."""

    of: Join

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """As the other join makes it of its parts."""
        return self.of.join(parts[0].split(list(self.of.rows)))

    def split(self, whole: Tensor) -> list[Tensor]:
        """The parts again, in one."""
        return [torch.cat(self.of.split(whole))]


@dataclass(frozen=True)
class Transposed(Join):
    """One matrix, (in, out) on their side; ``of`` is the join of what it is turned, (out, in)."""

    of: Join

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Of the whole, from that of the part."""
        return self.of.shape([part[::-1] for part in parts])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, (out, in)."""
        return self.of.join([part.t().contiguous() for part in parts])

    def split(self, whole: Tensor) -> list[Tensor]:
        """The part again, (in, out)."""
        return [part.t() for part in self.of.split(whole)]


@dataclass(frozen=True)
class Share(Join):
    """Rows ``start`` to ``stop`` of one tensor: other rules' shares are the rest of it."""

    start: int
    stop: int

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Of the share."""
        return self.stop - self.start, *parts[0][1:]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The share."""
        return parts[0][self.start : self.stop]

    def split(self, whole: Tensor) -> list[Tensor]:
        """The share itself: what reads all of them puts one below the other."""
        return [whole]
