"""Fused multiply-add in FP32, rounded once, by operations that round in FP64."""

import torch
from torch import Tensor


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a * b + c in FP32 as one correctly rounded operation.

    The product is exact in FP64. The sum is rounded to odd there: a number that FP64 does not hold
    becomes the neighbour whose last bit is 1, so that the rounding to FP32 sees no false tie
    (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    # What the sum lost, exactly (Knuth's two-sum); NaN where the sum is not finite.
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    changed = (bits & 1 == 0) & (lost.abs() > 0)
    outward = (lost > 0) == (total > 0)
    step = torch.where(changed, torch.where(outward, 1, -1), 0)
    return (bits + step).view(torch.float64).to(torch.float32)
