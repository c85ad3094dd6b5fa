"""Autocast around functions that it must not change, since their precision is a recipe's."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
