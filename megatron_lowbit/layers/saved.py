"""Takes operands apart into tensors, which autograd saves, and the rest, and puts them together."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat

_SAVED = object()
"""In place of a tensor."""


def take_apart(part: Any, tensors: list[Tensor]) -> Any:
    """What puts a part together again, once its tensors, appended to ``tensors``, are back.

    Parts are tensors, None, and dataclasses of tensors and other things.
    """
    if isinstance(part, Tensor):
        tensors.append(part)
        return _SAVED
    names = _names(type(part))
    if names is None:
        return part
    return type(part), [take_apart(getattr(part, name), tensors) for name in names]


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass that may have tensors; None for what stays as it is."""
    if not is_dataclass(kind) or issubclass(kind, BlockFormat):
        return None
    return tuple(field.name for field in fields(kind))


def put_together(description: Any, tensors: Iterator[Tensor]) -> Any:
    """The part that a description is of, from its tensors in the same order."""
    if description is _SAVED:
        return next(tensors)
    if isinstance(description, tuple) and description and isinstance(description[0], type):
        kind, parts = description
        return kind(*(put_together(part, tensors) for part in parts))
    return description
