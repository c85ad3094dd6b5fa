"""Functions of tensors that are one kernel on a GPU, where torch runs one for every operation."""

from collections.abc import Callable
from functools import cache, wraps

import torch
from torch import Tensor


def one_kernel(function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Run ``function``, of tensors only, through torch.compile on a GPU and as it is on a CPU.

    It sees its arguments without their autograd history, and may write into them. A GPU compiles at
    the first call, and again for other shapes: pretraining has few.
    """

    @cache
    def compiled() -> Callable[..., Tensor | None]:
        return torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*tensors: Tensor) -> Tensor | None:
        # With a history or without are two versions to torch.compile, which keeps eight.
        plain = [tensor.detach() for tensor in tensors]
        return (compiled() if plain[0].is_cuda else function)(*plain)

    return call
