"""Planned bytes of cross-entropy, against those of the operations that Megatron-LM's loss calls."""

import pytest
import torch
from built import parse
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lowbit.planning.compute import Device, head_times
from megatron_lowbit.planning.hardware import gpu

# isort: split
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

TOKENS, VOCABULARY = 64, 512
SPARSE = {"index", "index_put_"}
"""Operations that read or write one logit a token."""


class Traffic(TorchDispatchMode):
    """Count of the bytes that operations read and write in tensors as large as the logits."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in SPARSE:
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            self.moved += sum(x.nbytes for x in tensors if x.numel() == TOKENS * VOCABULARY)
        return result


def test_the_loss_moves_the_bytes_of_megatron_lms_operations(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    logits = torch.randn(TOKENS, 1, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(VOCABULARY, (TOKENS, 1))
    with Traffic() as traffic:
        vocab_parallel_cross_entropy(logits, target, tp_group=object()).sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    args = parse("--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16")
    device = Device(gpu("h200"), True, "mamba-ssm", accumulate=False)

    def seconds(vocabulary: int) -> float:
        times = head_times(args, vocabulary, TOKENS, device)
        return times.forward["elementwise"] + times.backward["elementwise"]

    planned = seconds(2 * VOCABULARY) - seconds(VOCABULARY)
    assert planned == pytest.approx(device.moved(traffic.moved))
