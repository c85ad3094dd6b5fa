"""Cross-entropy over tensor-parallel logits that are never held in FP32.

megatron-core's own, fused or not, makes an FP32 copy of all logits and keeps it for the backward
pass. The libraries' kernels that do not (Liger, Apex) need the whole vocabulary on every rank.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.megatron.one_kernel import one_kernel

# Without fusion the arithmetic holds a few FP32 tensors of this many elements, 256 MiB each.
_CHUNK_ELEMENTS = 1 << 26


class ChunkedLoss:
    """Of a megatron-core language model: the loss by :func:`vocab_parallel_cross_entropy`."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses (b, s) in FP32 of labels (b, s) and logits (s, b, this rank's vocabulary)."""
        losses = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1), self.tp_group)
        return losses.transpose(0, 1).contiguous()


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Each token's loss, in FP32, equal on all ranks of ``group``.

    The backward pass overwrites ``logits`` by their gradient: nothing else may need them then
    (autograd would raise RuntimeError), and it runs once.

    Args:
        logits: (..., v) of any floating-point type, contiguous; this rank's equal share of the
            vocabulary, in the order of ranks.
        labels: (...) of int64, token ids in the whole vocabulary.
        group: the tensor-parallel ranks.
    """
    return _CrossEntropy.apply(logits, labels, group)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are, and two FP32 numbers and the label of each token."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows = logits.view(-1, logits.size(-1))
        targets = labels.reshape(-1) - group.rank() * logits.size(-1)
        parts = [_statistics(*chunk) for chunk in _chunks(rows, targets)]
        largest, total, target = _combined(_of_all_ranks(torch.cat(parts, -1), group))
        ctx.save_for_backward(logits, targets, largest, total)
        return (total.log() - (target - largest)).view(labels.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, largest, total = ctx.saved_tensors
        rows = logits.view(-1, logits.size(-1))
        for chunk in _chunks(rows, targets, largest, total, grad.reshape(-1)):
            _overwrite_by_gradient(*chunk)
        return logits.detach(), None, None


def _chunks(rows: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same tokens of all tensors; sizes differ by one token at most."""
    count = min(len(rows), math.ceil(rows.numel() / _CHUNK_ELEMENTS))
    return zip(*(x.tensor_split(count) for x in (rows, *others)), strict=True)


@one_kernel
def _statistics(logits: Tensor, targets: Tensor) -> Tensor:
    """(3, n): largest logit of (n, v), sum of exp(logit - largest), the target's logit or 0.

    A target outside 0 to v - 1 is in another rank's share.
    """
    x, size = logits.float(), logits.size(-1)
    largest = x.amax(-1)
    total = (x - largest[:, None]).exp().sum(-1)
    here = (targets >= 0) & (targets < size)
    target = x.gather(-1, targets.clamp(0, size - 1)[:, None]).squeeze(-1)
    return torch.stack((largest, total, torch.where(here, target, 0.0)))


def _of_all_ranks(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(3, n) of this rank to (ranks, 3, n)."""
    if group.size() == 1:
        return statistics[None]
    gathered = statistics.new_empty((group.size(), *statistics.shape))
    dist.all_gather_into_tensor(gathered.flatten(0, 1), statistics, group=group)
    return gathered


def _combined(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three statistics, (n) each, of the whole vocabulary from (ranks, 3, n) of its shares."""
    largest, total, target = statistics.unbind(1)
    overall = largest.amax(0)
    return overall, (total * (largest - overall).exp()).sum(0), target.sum(0)


@one_kernel
def _overwrite_by_gradient(
    logits: Tensor, targets: Tensor, largest: Tensor, total: Tensor, grad: Tensor
) -> None:
    """In place of logits (n, v): (softmax - one-hot of targets) * grad, computed in FP32."""
    softmax = (logits.float() - largest[:, None]).exp() * (grad / total)[:, None]
    hit = torch.arange(logits.size(-1), device=logits.device) == targets[:, None]
    logits.copy_(torch.where(hit, softmax - grad[:, None], softmax))
