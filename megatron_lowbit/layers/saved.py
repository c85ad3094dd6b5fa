"""Takes operands apart into tensors, which autograd saves, and the rest, and puts them together."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
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
    if is_dataclass(part) and not isinstance(part, BlockFormat):
        return type(part), [take_apart(getattr(part, f.name), tensors) for f in fields(part)]
    return part


def put_together(description: Any, tensors: Iterator[Tensor]) -> Any:
    """The part that a description is of, from its tensors in the same order."""
    if description is _SAVED:
        return next(tensors)
    if isinstance(description, tuple) and description and isinstance(description[0], type):
        kind, parts = description
        return kind(*(put_together(part, tensors) for part in parts))
    return description
