"""Operands as tensors, which autograd saves, and a description that restores them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
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


_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """Keep torch.compile from tracing a function.

    A compiler need not keep the bits of quantization, and a trace would keep a call's random key.
    What the function itself compiles stays compiled.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            # Not before it is needed: torch's compiler takes a second to import.
            if not torch.compiler.is_compiling():
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts on a device; None where it is off."""
    kind = device.type
    # Devices without autocast, such as meta, raise an error at the second question.
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


_has_autocast = cache(torch.amp.is_autocast_available)


def without_autocast(function: _Function) -> _Function:
    """Disable autocast in the ``forward`` or ``backward`` of an autograd function.

    Autocast would round to 16 bits what a GEMM in FP32 multiplies. The device is that of the
    first argument behind the context.
    """

    @wraps(function)
    def call(ctx: Any, tensor: Tensor, *rest: Any) -> Any:
        if autocast_dtype(tensor.device) is None:
            return function(ctx, tensor, *rest)
        with torch.autocast(tensor.device.type, enabled=False):
            return function(ctx, tensor, *rest)

    return call  # type: ignore[return-value]
