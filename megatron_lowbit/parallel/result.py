"""Result of the operation, and the caller's buffers for one."""

from typing import NamedTuple

from torch import Tensor

from megatron_lowbit.numerics import QuantizedTensor


class Result(NamedTuple):
    """Normalized rows, their codes, and the sum with the residual; None for what is not wanted.

    As a call's ``out`` it holds the tensors that are to be filled; those that are None are new.
    """

    normalized: Tensor | None = None
    quantized: QuantizedTensor | None = None
    total: Tensor | None = None


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
            for one, other in zip(tensors_of(name, buffer), tensors_of(name, value), strict=True):
                check_buffer(name, one, other)
                one.copy_(other)
        filled.append(value if buffer is None else buffer)
    return Result(*filled)


def tensors_of(name: str, value: Tensor | QuantizedTensor | None) -> list[Tensor]:
    """Return the tensors of one field of a result. Raises ValueError for one that is not wanted."""
    if value is None:
        raise ValueError(f"out.{name}: this call does not make it")
    if isinstance(value, Tensor):
        return [value]
    return [value.codes, value.scales, value.tensor_scale]


def check_buffer(name: str, buffer: Tensor, like: Tensor) -> None:
    """Raise ValueError for a buffer that is unlike what is written, or not contiguous."""
    given = tuple(buffer.shape), buffer.dtype
    if given != (tuple(like.shape), like.dtype) or not buffer.is_contiguous():
        raise ValueError(
            f"out.{name}: {given[1]} {given[0]} is no contiguous {like.dtype} {tuple(like.shape)}"
        )
