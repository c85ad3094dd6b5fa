"""A product that is not finite, computed again from operands in high precision."""

import torch
from torch import Tensor

from megatron_lowbit.numerics import gemm


def recompute_unless_finite(
    y: Tensor, lhs: Tensor, rhs: Tensor, bias: Tensor | None, count: Tensor | None
) -> Tensor:
    """Return y where all of it is finite, else ``lhs @ rhs.T + bias`` in y's dtype.

    On a GPU nothing waits for the answer: a kernel reads it from device memory, and ends at once
    where y is finite.

    Args:
        y: (M, N), a product of quantized operands.
        lhs: (M, K), high precision.
        rhs: (N, K), high precision.
        bias: (N,), or None.
        count: int64 scalar to which 1 is added for a product that is not finite, or None.
    """
    if y.numel() == 0:
        return y
    if y.is_cuda:
        from megatron_lowbit.kernels.fallback import largest_bits, recompute

        amax = largest_bits(y)
        recompute(y, amax, lhs, rhs, bias)
        failed = ~amax.view(torch.float32).isfinite()
    else:
        failed = ~y.isfinite().all()
        if failed:
            y = gemm(lhs, rhs, bias, None, y.dtype)
    if count is not None:
        count += failed
    return y
