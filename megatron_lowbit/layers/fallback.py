"""Fallback of a recipe: a product that is not finite is computed again in high precision."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_lowbit.numerics import gemm


@dataclass(frozen=True)
class WithSource:
    """A quantized operand (R, K), and the tensor in high precision that it was made from."""

    operand: Any
    source: Tensor


def without_source(operand: Any) -> Any:
    """Return the operand as the engine made it."""
    return operand.operand if isinstance(operand, WithSource) else operand


def recompute_unless_finite(
    y: Tensor, lhs: Any, rhs: Any, bias: Tensor | None, count: Tensor | None
) -> Tensor:
    """Return y (M, N) where all of it is finite, else ``lhs @ rhs.T + bias`` in y's dtype.

    On a GPU nothing waits for the answer: a kernel reads it from device memory, and ends at once
    where y is finite.

    Args:
        y: a product of quantized operands.
        lhs, rhs: (M, K) and (N, K), in high precision or with their sources; y stays as it is
            where one has none.
        bias: (N,), or None.
        count: int64 scalar to which 1 is added for a product that is not finite, or None.
    """
    left, right = (x.source if isinstance(x, WithSource) else x for x in (lhs, rhs))
    if y.numel() == 0 or not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return y
    if y.is_cuda:
        from megatron_lowbit.kernels.amaxes import matrix_amax
        from megatron_lowbit.kernels.conditional import recompute

        amax = matrix_amax(y)
        recompute(y, amax, left, right, bias)
        failed = ~amax.isfinite()
    else:
        failed = ~y.isfinite().all()
        if failed:
            y = gemm(left, right, bias, None, y.dtype)
    if count is not None:
        count += failed
    return y
