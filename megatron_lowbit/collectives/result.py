"""Result of the operation, and the caller's buffers for one."""

from typing import NamedTuple

import torch
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
    device = (made.normalized if made.quantized is None else made.quantized.codes).device
    filled = []
    for name, buffer, value in zip(Result._fields, out, made, strict=True):
        if buffer is not None:
            check_buffer(name, buffer, value, device)
            for one, other in zip(tensors_of(buffer), tensors_of(value), strict=True):
                one.copy_(other)
        filled.append(value if buffer is None else buffer)
    return Result(*filled)


def check_buffer(
    name: str,
    buffer: Tensor | QuantizedTensor,
    like: Tensor | QuantizedTensor | None,
    device: torch.device,
) -> None:
    """Raise ValueError unless a call on ``device`` can fill a buffer as it fills ``like``.

    ``like`` may be on the meta device; None stands for what the call does not make.
    """
    if like is None:
        raise ValueError(f"out.{name}: this call does not make it")
    if isinstance(like, QuantizedTensor) and buffer.format != like.format:
        raise ValueError(f"out.{name}: its format is {buffer.format}, the call's {like.format}")
    for one, other in zip(tensors_of(buffer), tensors_of(like), strict=True):
        if one.device != device:
            raise ValueError(f"out.{name}: it is on {one.device}, x on {device}")
        if (one.shape, one.dtype) != (other.shape, other.dtype) or not one.is_contiguous():
            raise ValueError(
                f"out.{name}: {one.dtype} {tuple(one.shape)} is no contiguous {other.dtype} "
                f"{tuple(other.shape)}"
            )


def tensors_of(value: Tensor | QuantizedTensor) -> list[Tensor]:
    """Return the tensors of one field of a result."""
    if isinstance(value, Tensor):
        return [value]
    return [value.codes, value.scales, value.tensor_scale]
