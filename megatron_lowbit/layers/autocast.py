"""Functions that autocast must not change: their precision is a recipe's."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_autocast(function: _Function) -> _Function:
    """Disable autocast in the ``forward`` or ``backward`` of an autograd function.

    Autocast would round to 16 bits what a GEMM in FP32 multiplies. The device is that of the
    first argument behind the context.
    """

    @wraps(function)
    def call(ctx: Any, tensor: Tensor, *rest: Any) -> Any:
        kind = tensor.device.type
        if not torch.is_autocast_enabled(kind):
            return function(ctx, tensor, *rest)
        with torch.autocast(kind, enabled=False):
            return function(ctx, tensor, *rest)

    return call  # type: ignore[return-value]
