"""Zeros that kernels add to or raise, such as amaxes, from few fills."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv

_BATCH = 1024
_ALIGNED = 4
"""Numbers in 16 bytes."""
_NONE: Iterator[Tensor] = iter(())
_ZEROS: dict[tuple[tuple[int, ...], torch.device, int], Iterator[Tensor]] = {}
"""Zeros that are left of the last fill, by shape, device and stream."""


def zeros_of(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return FP32 zeros, aligned to 16 bytes, in memory that nothing else has or had.

    One fill makes many of them: it takes as long on the CPU as the kernel that needs one. A CUDA
    graph fills its own each time that it runs.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(shape, device=device)
    key = shape, device, torch._C._cuda_getCurrentRawStream(device.index)
    zeros = next(_ZEROS.get(key, _NONE), None)
    if zeros is None:
        _ZEROS[key] = iter(_filled(shape, device).unbind())
        zeros = next(_ZEROS[key])
    return zeros


def _filled(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return zeros (_BATCH, *shape), each of them aligned."""
    size = math.prod(shape)
    apart = torch.zeros((_BATCH, cdiv(size, _ALIGNED) * _ALIGNED), device=device)
    return apart[:, :size].unflatten(1, shape) if shape else apart[:, 0]
