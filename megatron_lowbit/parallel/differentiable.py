"""The operation with gradients: of a tensor-parallel layer's output, residual and RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lowbit.numerics.rmsnorm import RMSNorm
from megatron_lowbit.parallel.all_reduce_norm import AllReduceNorm


class _AllReduceRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor, gain: Tensor, eps: float, run: AllReduceNorm):
        rows = [tensor.reshape(-1, x.shape[-1]).contiguous() for tensor in (x, residual)]
        normalized, total = run(*rows, RMSNorm(eps), gain)
        total = total.view(x.shape)
        ctx.save_for_backward(total, gain)
        ctx.eps = eps
        return normalized.view(x.shape), total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_normalized: Tensor, grad_total: Tensor):
        total, gain = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            normalized = F.rms_norm(total, gain.shape, gain, ctx.eps)
        grad, grad_gain = torch.autograd.grad(normalized, (total, gain), grad_normalized)
        # An all-reduce's backward is no all-reduce: every rank has the whole gradient.
        grad = grad + grad_total
        return grad, grad, grad_gain, None, None


def all_reduce_rms_norm(
    run: AllReduceNorm, x: Tensor, residual: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm, times gain (K,), of the sum of all ranks' x (..., K) and the residual; and that sum.

    Gradients are those of an all-reduce, an addition and torch's RMSNorm one after another.
    """
    return _AllReduceRMSNorm.apply(x, residual, gain, eps, run)
