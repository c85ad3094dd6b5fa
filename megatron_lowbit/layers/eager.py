"""Functions that torch.compile runs as they are, in a break of its graph."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

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
