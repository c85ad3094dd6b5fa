"""Operands as tensors, which autograd saves, and a description that restores them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat

_TENSOR = object()
"""Placeholder for a tensor in a description."""


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors of a value to a list; return the description that restores the value.

    Values are tensors, None, and dataclasses or lists of tensors and other things.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if value is None:
        return None
    kind = type(value)
    if kind is list:
        return [flatten(part, tensors) for part in value]
    parts_of = _fields(kind)  # type: ignore[arg-type]  # a type is hashable
    if parts_of is None:
        return value
    parts = []
    for part in parts_of(value):  # most are tensors or None
        if isinstance(part, Tensor):
            tensors.append(part)
            parts.append(_TENSOR)
        else:
            parts.append(None if part is None else flatten(part, tensors))
    return _Dataclass(kind, parts)


class _Dataclass(NamedTuple):
    """Description of a dataclass: its type, and the descriptions of its fields."""

    kind: type
    fields: list[Any]


@cache
def _fields(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """Return what gets all fields of a dataclass; None for a type that holds no tensors."""
    if not is_dataclass(kind) or issubclass(kind, BlockFormat):
        return None
    names = [field.name for field in fields(kind)]
    return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, *names)]


def unflatten(description: Any, tensors: Iterator[Tensor]) -> Any:
    """Restore a value from its description and its tensors, in the same order."""
    if description is _TENSOR:
        return next(tensors)
    kind = type(description)
    if kind is list:
        return [unflatten(part, tensors) for part in description]
    if kind is not _Dataclass:
        return description
    parts = [
        next(tensors) if part is _TENSOR else None if part is None else unflatten(part, tensors)
        for part in description.fields
    ]
    return description.kind(*parts)
