"""Result of the operation, and the caller's buffers for one."""

from typing import Any, NamedTuple

from torch import Tensor

from megatron_lowbit.numerics import QuantizedTensor


class Result(NamedTuple):
    """Normalized rows, their codes, and the sum with the residual; None for what is not wanted.

    As a call's ``out`` it holds the tensors that are to be filled; those that are None are new.
    """

    normalized: Tensor | None = None
    quantized: QuantizedTensor | None = None
    total: Tensor | None = None


Value = Tensor | QuantizedTensor
NEW = Result()
"""No buffer of the caller's."""


def fill(out: Result, made: Result) -> Result:
    """Copy a result into the buffers of ``out``; what has none stays as it is.

    Raises:
        ValueError: a buffer for what is not wanted, or unlike it.
    """
    filled = []
    for name, buffer, value in zip(Result._fields, out, made, strict=True):
        if buffer is not None:
            for one, other in pairs_of(name, buffer, value):
                one.copy_(other)
        filled.append(value if buffer is None else buffer)
    return Result(*filled)


def pairs_of(name: str, buffer: Value, value: Value | None) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a buffer, each with that of the value which it is for.

    Raises:
        ValueError: there is no such value, it has another format, shape or dtype, or a tensor of
            the buffer is not contiguous.
    """
    if value is None:
        raise ValueError(f"out.{name}: this call does not make it")
    if isinstance(value, Tensor):
        pairs = [(buffer, value)]
    elif not isinstance(buffer, Tensor) and buffer.format == value.format:
        parts = ("codes", "scales", "tensor_scale")
        pairs = [(getattr(buffer, part), getattr(value, part)) for part in parts]
    else:
        raise ValueError(f"out.{name}: not of format {value.format}")
    for one, other in pairs:
        _check_buffer(name, one, other)
    return pairs


def _check_buffer(name: str, buffer: Any, like: Tensor) -> None:
    """Raise ValueError for a buffer that is unlike what is written, or not contiguous."""
    given = tuple(buffer.shape), buffer.dtype
    if given != (tuple(like.shape), like.dtype) or not buffer.is_contiguous():
        raise ValueError(
            f"out.{name}: {given[1]} {given[0]} is no contiguous {like.dtype} {tuple(like.shape)}"
        )
