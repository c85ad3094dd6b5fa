"""NVFP4's tensor scale as its reciprocal, and back without a lost bit."""

import torch
from torch import Tensor


def reciprocal(scale: Tensor) -> Tensor:
    """Return the number whose rounded FP32 reciprocal is ``scale``."""
    rounded = 1.0 / scale
    result = rounded
    for limit in (-torch.inf, torch.inf):
        neighbour = rounded.nextafter(torch.full_like(rounded, limit))
        result = torch.where(1.0 / neighbour == scale, neighbour, result)
    return torch.where(1.0 / rounded == scale, rounded, result)
