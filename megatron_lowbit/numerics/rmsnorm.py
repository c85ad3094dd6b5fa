"""RMSNorm with sums in a fixed order, so that kernels can give the same bits.

A row's squares are added up in FP32, neighbours to neighbours in groups of 8, then the groups'
sums as a tree, halves to halves:

    RMS = sqrt((x_1**2 + .. + x_C**2) / C + eps)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 8


@dataclass(frozen=True)
class RMSNorm:
    """Rows divided by their RMS; ``eps`` is added under the root. It has no gain."""

    eps: float = 1e-5

    def inverse_rms(self, x: Tensor, block: int = 1) -> Tensor:
        """Return the factors, FP32 (R, 1), that normalize the rows of x (R, C); any block."""
        mean = divide(grouped_sum(x.float().square()), x.shape[-1])
        return torch.ones_like(mean).div(square_root(mean + self.eps))[..., None]

    def normalize(self, x: Tensor, block: int = 1) -> Tensor:
        """Normalize x (R, C), in FP32."""
        return x.float() * self.inverse_rms(x, block)


def grouped_sum(values: Tensor) -> Tensor:
    """Sum the last axis in FP32: neighbours in groups of 8, then the groups' sums as a tree."""
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % GROUP))
    for _ in range(GROUP.bit_length() - 1):
        values = values[..., 0::2] + values[..., 1::2]
    return tree_sum(values)


def tree_sum(values: Tensor) -> Tensor:
    """Sum the last axis in FP32, padded to a power of two: upper half added to lower half."""
    length = values.shape[-1]
    values = torch.nn.functional.pad(values, (0, (1 << (length - 1).bit_length()) - length))
    while values.shape[-1] > 1:
        lower, upper = values.chunk(2, dim=-1)
        values = lower + upper
    return values.squeeze(-1)


def divide(values: Tensor, count: int) -> Tensor:
    """Divide FP32 values by a count, correctly rounded."""
    # A tensor over a tensor: torch may turn tensor / number into tensor * (1 / number).
    return values / torch.full((), float(count), device=values.device)


def square_root(x: Tensor) -> Tensor:
    """Return FP32 square roots, correctly rounded."""
    # By FP64, which rounds as IEEE says: torch's own FP32 root on a CPU does not always.
    return x.double().sqrt().float()
