"""Exact, invertible transforms between Hugging Face's tensors and Megatron-LM's.

The shape of a result follows from the shapes of its parts, before any tensor is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Join:
    """Concatenation along the first axis. ``rows`` are the parts' lengths along it."""

    rows: tuple[int, ...]

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the whole, from those of the parts."""
        return sum(part[0] for part in parts), *parts[0][1:]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole, (sum of rows, ...)."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the parts."""
        return list(whole.split(list(self.rows)))


@dataclass(frozen=True)
class Cut(Join):
    """One tensor whose rows beyond ``rows[0]`` are padding: megatron-core pads vocabularies."""

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the rows that stand for tokens."""
        return [whole[: self.rows[0]]]


@dataclass(frozen=True)
class QueryKeyValue(Join):
    """Query, key and value by groups: for each, its queries' heads, its key, its value."""

    groups: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole in the order of megatron-core's ``linear_qkv``."""
        by_group = [part.unflatten(0, (self.groups, -1)) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return query, key and value."""
        by_group = whole.unflatten(0, (self.groups, -1))
        ends = list(accumulate(rows // self.groups for rows in self.rows))
        starts = [0, *ends[:-1]]
        return [
            by_group[:, start:end].flatten(0, 1)
            for start, end in zip(starts, ends, strict=True)
        ]  # fmt: skip


@dataclass(frozen=True)
class Stacked(Join):
    """One tensor that is the concatenation of another join's parts."""

    of: Join

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Split the tensor and join the parts by the other join."""
        return self.of.join(parts[0].split(list(self.of.rows)))

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the concatenation of the other join's parts."""
        return [torch.cat(self.of.split(whole))]


@dataclass(frozen=True)
class Transposed(Join):
    """A matrix (in, out) in Hugging Face's files; ``of`` joins its transpose, (out, in)."""

    of: Join

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the whole, from that of the part."""
        return self.of.shape([part[::-1] for part in parts])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole, (out, in)."""
        return self.of.join([part.t().contiguous() for part in parts])

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the part, (in, out)."""
        return [part.t() for part in self.of.split(whole)]


@dataclass(frozen=True)
class Share(Join):
    """Rows ``start`` to ``stop`` of one tensor: other rules' shares are the rest of it."""

    start: int
    stop: int

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the share."""
        return self.stop - self.start, *parts[0][1:]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the share."""
        return parts[0][self.start : self.stop]

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the share itself; the reader of all shares concatenates them."""
        return [whole]
