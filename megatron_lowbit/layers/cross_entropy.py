"""Cross-entropy of logits, whose gradient takes their place in memory."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_lowbit.kernels import loss
from megatron_lowbit.layers.autograd_state import once_differentiable


def cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Compute the cross-entropy of each token.

    A label outside the vocabulary, such as -100, counts like the largest logit in the loss and like
    none in the gradient, as in Megatron-LM's loss: a loss mask excludes its token.

    Args:
        logits: (sequence, batch, this rank's share of the vocabulary), BF16, FP16 or FP32. Backward
            overwrites them, or a copy if they are not contiguous. It raises RuntimeError the second
            time, as does the backward pass of another operation that needs them later.
        labels: indices of the whole vocabulary (sequence, batch), int64.
        group: ranks that share the vocabulary; None for this rank only.

    Returns:
        Losses (sequence, batch) in FP32.
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels, group)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        rows = logits.detach().contiguous().flatten(0, -2)
        indices = labels.reshape(-1).contiguous()
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        columns = rows.shape[1]
        statistics = loss.row_statistics(rows, indices, rank * columns)
        if ranks > 1:  # from each rank's share to the whole vocabulary
            highest = statistics[0].clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            statistics[1] *= (statistics[0] - highest).exp()
            statistics[0] = highest
            dist.all_reduce(statistics[1:], dist.ReduceOp.SUM, group)
        highest, total, target = statistics
        known = (indices >= 0) & (indices < ranks * columns)
        ctx.save_for_backward(rows, indices, statistics)
        ctx.first, ctx.shape = rank * columns, logits.shape
        losses: Tensor = total.log() + (highest - target) * known
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        rows, indices, statistics = ctx.saved_tensors
        grads = grad_losses.reshape(-1).contiguous()  # a sum's is one number, expanded
        loss.write_gradients(rows, indices, ctx.first, statistics, grads)
        increment_version(rows)  # Autograd refuses to read them as logits.
        return rows.view(ctx.shape), None, None
