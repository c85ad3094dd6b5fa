"""Scale arithmetic that FP4 formats with 8-bit block scales have in common, all in FP32.

Quotients are of a tensor over a tensor: torch may turn a quotient with a number into a product with
a reciprocal, which rounds twice.
"""

import torch
from torch import Tensor

from megatron_lowbit.numerics.formats import E4M3, encode

_FLT_MAX = torch.finfo(torch.float32).max
_LEAST = 2.0**-149
"""FP32's smallest number, in place of a tensor scale that underflows."""


def encode_scale(amax: Tensor, top: float) -> Tensor:
    """Return min(top / amax, FLT_MAX), which brings a tensor's amax to ``top``; 1 for zeros."""
    scale = (torch.full_like(amax, top) / amax).clamp(max=_FLT_MAX)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def multiplier(scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """Return what elements are multiplied by: min(1 / (scale * tensor scale), FLT_MAX)."""
    return (1.0 / (scales.to(torch.float32) * tensor_scale)).clamp(max=_FLT_MAX)


def decode_scale(amax: Tensor, scale: float, element: float) -> Tensor:
    """Return amax / scale / element, at least FP32's smallest number; 1 for zeros."""
    found = amax / torch.full_like(amax, scale) / torch.full_like(amax, element)
    return torch.where(amax == 0, torch.ones_like(amax), found.clamp(_LEAST))


def positive_scales(base: Tensor, tensor_scale: Tensor) -> Tensor:
    """Return E4M3 numbers next to base / tensor_scale, in FP32; 1 in place of 0."""
    scales = encode(base / tensor_scale, E4M3).to(torch.float32)
    return torch.where(scales == 0, torch.ones_like(scales), scales)
