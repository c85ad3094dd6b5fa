"""Operands as tensors, which autograd saves, and a description that restores them."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
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
    kind = type(value)
    if kind is list:
        return [flatten(part, tensors) for part in value]
    names = _field_names(kind)  # type: ignore[arg-type]  # a type is hashable
    if names is None:
        return value
    return _Dataclass(kind, [flatten(getattr(value, name), tensors) for name in names])


class _Dataclass(NamedTuple):
    """Description of a dataclass: its type, and the descriptions of its fields."""

    kind: type
    fields: list[Any]


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass that may hold tensors; None for a type without any."""
    if not is_dataclass(kind) or issubclass(kind, BlockFormat):
        return None
    return tuple(field.name for field in fields(kind))


def unflatten(description: Any, tensors: Iterator[Tensor]) -> Any:
    """Restore a value from its description and its tensors, in the same order."""
    if description is _TENSOR:
        return next(tensors)
    kind = type(description)
    if kind is list:
        return [unflatten(part, tensors) for part in description]
    if kind is _Dataclass:
        return description.kind(*[unflatten(part, tensors) for part in description.fields])
    return description
