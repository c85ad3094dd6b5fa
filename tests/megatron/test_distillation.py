"""Distillation: gradients compared with FP64, losses of models, and what is refused.

As a script this file is one rank of a job: it calls :func:`compare_shards`.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.distillation import attach, kl_divergence
from tests.megatron.test_compatibility import hooks

VOCABULARY = 96


def exact(logits, teacher, weights):
    """Return torch's divergences and the gradient of their weighted sum, in FP64."""
    logits = logits.detach().double().requires_grad_()
    log_q, log_p = (F.log_softmax(x.double(), -1) for x in (logits, teacher.detach()))
    divergences = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    divergences.backward(weights.double())
    return divergences.detach(), logits.grad


def draw(scale=4.0):
    """Return logits (5, 2, V) of a model and of a teacher, and weights (5, 2)."""
    random = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(5, 2, VOCABULARY, generator=random)
    teacher = logits + torch.randn(5, 2, VOCABULARY, generator=random)
    return logits, teacher, torch.rand(5, 2, generator=random)


def check(logits, teacher, weights, group, share=slice(None)):
    """Compare this rank's share of the vocabulary with all of it in FP64.

    In FP32, logits up to 20 and their logarithms of sums have errors of up to 4 units of 2^-20, so
    relative errors of probabilities are below 2^-18. BF16 rounds q - p and the gradient to 8 bits.
    """
    expected, gradient = exact(logits, teacher, weights)
    shard = logits[..., share].clone().requires_grad_()
    divergences = kl_divergence(shard, teacher[..., share], group)
    divergences.backward(weights)
    assert divergences.dtype is torch.float32
    torch.testing.assert_close(divergences.double(), expected, rtol=2**-16, atol=2**-18)
    assert shard.grad.dtype is logits.dtype
    rounding = 2**-7 if logits.dtype is torch.bfloat16 else 0
    torch.testing.assert_close(
        shard.grad.double(), gradient[..., share], rtol=rounding + 2**-16, atol=2**-18
    )


@pytest.mark.parametrize("scale", [0.1, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_divergences_and_gradients_are_those_of_float64(dtype, scale):
    logits, teacher, weights = draw(scale)
    check(logits.to(dtype), teacher.to(dtype), weights, None)


def test_equal_logits_have_neither_divergence_nor_gradient():
    logits = draw()[0].requires_grad_()
    divergences = kl_divergence(logits, logits.detach(), None)
    divergences.sum().backward()
    assert not divergences.any() and not logits.grad.any()


def compare_shards() -> None:
    """Check the divergence of ranks that share the vocabulary."""
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    width = VOCABULARY // ranks
    share = slice(rank * width, (rank + 1) * width)
    check(*draw(), torch.distributed.group.WORLD, share)
    torch.distributed.destroy_process_group()


def test_ranks_that_share_the_vocabulary_have_its_divergence(run_ranks):
    run_ranks(__file__, 2, timeout=60)


class Model(nn.Module):
    """Stand-in for a chunk: its logits are rows of a table."""

    pg_collection = SimpleNamespace(tp=None)

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=random))

    def compute_language_model_loss(self, labels, logits):
        return F.cross_entropy(logits.flatten(0, 1), labels.t().flatten()).expand(labels.shape)

    def forward(self, tokens, labels=None, loss_mask=None):
        logits = self.table[tokens]  # (batch, sequence, vocabulary)
        if labels is None:
            return logits
        return self.compute_language_model_loss(labels, logits.transpose(0, 1))


def test_training_has_the_divergence_and_validation_the_cross_entropy():
    tokens = torch.arange(12).view(3, 4)
    student, teacher = Model(0), Model(1)
    cross_entropy = student(tokens, labels=tokens)
    attach(student, teacher)
    assert [name for name, _ in student.named_parameters()] == ["table"]
    expected, _ = exact(student.table[tokens], teacher.table[tokens], torch.ones(3, 4))
    losses = student(tokens, labels=tokens, loss_mask=None)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    losses.sum().backward()
    assert student.table.grad is not None and teacher.table.grad is None
    assert torch.equal(student.eval()(tokens, labels=tokens), cross_entropy)


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--pipeline-model-parallel-size above 1", {"pipeline_model_parallel_size": 2}),
        ("--mtp-num-layers", {"mtp_num_layers": 1}),
        ("--mxnorm", {"mxnorm": True}),
        ("--fp8-format", {"fp8": "e4m3"}),
        ("--fp4-format", {"fp4": "e2m1"}),
        ("--cuda-graph-impl", {"cuda_graph_impl": "transformer_engine"}),
        ("--use-megatron-fsdp", {"use_megatron_fsdp": True}),
        ("--use-torch-fsdp2", {"use_torch_fsdp2": True}),
        ("--overlap-moe-expert-parallel-comm", {"overlap_moe_expert_parallel_comm": True}),
    ],
)
def test_arguments_that_exclude_a_teacher(flag, given):
    with pytest.raises(UserError, match=f"^{flag} with --distill-from: .*; omit one of them"):
        hooks(["bf16"], distill_from="nowhere", **given)


@pytest.mark.parametrize(("given", "teacher"), [("", 8), ("iter_0000004", 4)])
def test_the_teacher_is_the_newest_checkpoint_or_the_given_one(tmp_path, given, teacher):
    for iteration in (4, 8):
        path = tmp_path / f"iter_{iteration:07}"
        path.mkdir()
        (path / ".metadata").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    [add_teacher] = hooks(None, distill_from=str(tmp_path / given))
    assert add_teacher.args[1] == tmp_path / f"iter_{teacher:07}"


def test_a_teacher_must_be_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match=f"^--distill-from {tmp_path}: no checkpoint, .* give "):
        hooks(None, distill_from=str(tmp_path))


if __name__ == "__main__":
    assert sys.argv[1:]  # the rank
    compare_shards()
