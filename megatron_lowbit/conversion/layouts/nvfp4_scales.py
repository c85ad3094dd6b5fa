"""NVFP4's tensor scale as its reciprocal, and back without a lost bit."""

import torch
from torch import Tensor


def reciprocal(scale: Tensor) -> Tensor:
    """Find the number whose rounded FP32 reciprocal ``scale`` is."""
    near = 1.0 / scale
    found = near
    for limit in (-torch.inf, torch.inf):
        beside = near.nextafter(torch.full_like(near, limit))
        found = torch.where(1.0 / beside == scale, beside, found)
    return torch.where(1.0 / near == scale, near, found)
