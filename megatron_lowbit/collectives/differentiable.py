"""The operation with gradients: of a tensor-parallel layer's output, residual and RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lowbit.collectives.all_reduce_norm import AllReduceNorm
from megatron_lowbit.collectives.result import Result
from megatron_lowbit.numerics import QuantizedTensor, Request
from megatron_lowbit.numerics.rmsnorm import RMSNorm


class _AllReduceRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, residual: Tensor, gain: Tensor, eps: float, run: AllReduceNorm,
        request: Request | None,
    ):  # fmt: skip
        rows = [tensor.reshape(-1, x.shape[-1]).contiguous() for tensor in (x, residual)]
        # No views: megatron-core replaces a view by a new tensor, which nothing was handed for.
        normalized, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in rows)
        out = Result(normalized=normalized.view_as(rows[0]), total=total.view_as(rows[0]))
        codes = run(*rows, RMSNorm(eps), gain, request, keep_normalized=True, out=out).quantized
        ctx.save_for_backward(total, gain)
        ctx.eps = eps
        return normalized, total, codes

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_normalized: Tensor, grad_total: Tensor, _):
        total, gain = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            normalized = F.rms_norm(total, gain.shape, gain, ctx.eps)
        grad, grad_gain = torch.autograd.grad(normalized, (total, gain), grad_normalized)
        # An all-reduce's backward is no all-reduce: every rank has the whole gradient.
        grad = grad + grad_total
        return grad, grad, grad_gain, None, None, None


def all_reduce_rms_norm(
    run: AllReduceNorm,
    x: Tensor,
    residual: Tensor,
    gain: Tensor,
    eps: float,
    request: Request | None = None,
) -> tuple[Tensor, Tensor, QuantizedTensor | None]:
    """Normalize the sum of all ranks' x (..., K) and the residual by RMSNorm times gain (K,).

    Gradients are those of an all-reduce, an addition and torch's RMSNorm one after another.

    Returns:
        The normalized rows (..., K), the sum (..., K), and the rows' codes (R, K) where a
        ``request`` says how they are quantized.
    """
    return _AllReduceRMSNorm.apply(x, residual, gain, eps, run, request)
