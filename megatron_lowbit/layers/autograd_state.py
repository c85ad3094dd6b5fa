"""Operands as tensors, which autograd saves, and a description that restores them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as torch_once_differentiable

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
    if isinstance(value, list):
        return [flatten(part, tensors) for part in value]
    cls: Any = type(value)
    names = _field_names(cls)
    if not names:
        return value
    return _Dataclass(cls, [flatten(getattr(value, name), tensors) for name in names])


class _Dataclass(NamedTuple):
    """Description of a dataclass: its type, and the descriptions of its fields."""

    cls: type
    fields: list[Any]


@cache
def _field_names(cls: type) -> list[str]:
    """Return the names of a dataclass's fields; none for a type that holds no tensors."""
    holds_tensors = is_dataclass(cls) and not issubclass(cls, BlockFormat)
    return [field.name for field in fields(cls)] if holds_tensors else []


def unflatten(description: Any, tensors: Iterator[Tensor]) -> Any:
    """Restore a value from its description and its tensors, in the same order."""
    if description is _TENSOR:
        return next(tensors)
    if isinstance(description, list):
        return [unflatten(part, tensors) for part in description]
    if isinstance(description, _Dataclass):
        return description.cls(*(unflatten(part, tensors) for part in description.fields))
    return description


def save(ctx: Any, values: Iterable[Any], weights: Sequence[Tensor]) -> None:
    """Save values for the backward pass, which :func:`restore` returns.

    Weights are not saved as autograd saves tensors: hooks on saved tensors would copy them in high
    precision, although most GEMMs take codes.
    """
    tensors: list[Tensor] = []
    ctx.saved = [flatten(value, tensors) for value in values]
    ctx.save_for_backward(*tensors)
    ctx.versions = [(weight, weight._version) for weight in weights]


def restore(ctx: Any) -> list[Any]:
    """Return the values that :func:`save` saved.

    Raises RuntimeError for a weight that has changed since forward, as autograd does.
    """
    for weight, version in ctx.versions:
        if weight._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a weight {tuple(weight.shape)} of a quantized linear layer is "
                f"at version {weight._version}; expected version {version} instead"
            )
    tensors = iter(ctx.saved_tensors)
    return [unflatten(value, tensors) for value in ctx.saved]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def once_differentiable(backward: _Function) -> _Function:
    """Raise RuntimeError in a second derivative of an autograd function.

    torch's decorator of this name does so only if the gradient of the output has a graph.
    Otherwise the derivatives by input and weight, on which this gradient depends as well, would be
    missing without an error.
    """
    refusing = torch_once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, grad: Tensor, *rest: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            grad = grad.detach().requires_grad_()
        return refusing(ctx, grad, *rest)

    return call  # type: ignore[return-value]


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
    device_type = device.type
    # Devices without autocast, such as meta, raise an error at the second question, and torch 2.11
    # cannot compile the call that asks whether a device has it.
    if device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def autocast_off(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast on a device, which would round what a GEMM in FP32 multiplies to 16 bits."""
    is_on = autocast_dtype(device) is not None
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def without_autocast(function: _Function) -> _Function:
    """Disable autocast in the ``forward`` or ``backward`` of an autograd function.

    The device is the device of the first argument after the context.
    """

    @wraps(function)
    def call(ctx: Any, tensor: Tensor, *rest: Any) -> Any:
        with autocast_off(tensor.device):
            return function(ctx, tensor, *rest)

    return call  # type: ignore[return-value]
