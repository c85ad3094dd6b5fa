"""The loss over vocabulary shards against torch's in FP64 and megatron-core's own."""

import pytest
import torch

from megatron_lowbit.megatron import cross_entropy
from megatron_lowbit.megatron.cross_entropy import vocab_parallel_cross_entropy

# isort: split
from megatron.core import parallel_state, tensor_parallel

SEQUENCE, BATCH, VOCABULARY = 7, 3, 40
# At most so many tokens at a time: in chunks of 21, of 7, of 11 and 10, of 1.
CHUNKS = {"one": 21, "even": 7, "ragged": 16, "single": 1}


class Share:
    """The group of one rank among several, as far as the loss looks at it."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.size = (lambda: rank), (lambda: ranks)


@pytest.fixture
def case():
    """Logits of some size, labels, and the gradient of each token's loss, one of them masked."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(SEQUENCE, BATCH, VOCABULARY, generator=generator) * 8
    labels = torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=generator)
    labels[0, 0], labels[0, 1] = 0, VOCABULARY - 1
    grad = torch.rand(SEQUENCE, BATCH, generator=generator)
    grad[1, 1] = 0
    return logits.cuda(), labels.cuda(), grad.cuda()  # nothing, on a CPU


@pytest.fixture(params=CHUNKS.values(), ids=CHUNKS)
def chunk(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_ELEMENTS", request.param * VOCABULARY)


def reference(logits, labels, grad):
    """Losses and gradient in FP64."""
    x = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        x.flatten(0, 1), labels.flatten(), reduction="none"
    ).view_as(labels)
    losses.backward(grad.double())
    return losses.detach(), x.grad


def computed(logits, labels, grad, group=None):
    """The same two here, from a copy of the logits that autograd goes on from."""
    x = logits.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(x * 1, labels, group or Share())
    losses.backward(grad)
    return losses.detach(), x.grad


def test_loss_and_gradient(case, chunk):
    losses, gradient = computed(*case)
    expected, expected_gradient = reference(*case)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_the_vocabulary(case, ranks, monkeypatch):
    logits, labels, grad = case
    size = VOCABULARY // ranks
    shards = [shard.contiguous() for shard in logits.split(size, -1)]
    everyones = torch.stack([
        cross_entropy._statistics(shard.flatten(0, 1), labels.flatten() - rank * size)
        for rank, shard in enumerate(shards)
    ])  # fmt: skip

    def gather(own, group):
        assert torch.equal(own, everyones[group.rank()])
        return everyones

    monkeypatch.setattr(cross_entropy, "_of_all_ranks", gather)
    parts = [computed(x, labels, grad, Share(rank, ranks)) for rank, x in enumerate(shards)]
    losses, gradients = zip(*parts, strict=True)
    expected, expected_gradient = reference(*case)
    assert all(torch.equal(losses[0], other) for other in losses)
    torch.testing.assert_close(losses[0].double(), expected, rtol=1e-6, atol=1e-6)
    gradient = torch.cat(gradients, -1).double()
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_bf16_logits_are_overwritten(case):
    logits, labels, grad = case
    rounded = logits.bfloat16()
    x = rounded.clone().requires_grad_()
    passed_on = x * 1
    memory = passed_on.data_ptr()
    seen = []
    passed_on.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    losses = vocab_parallel_cross_entropy(passed_on, labels, Share())
    assert losses.dtype == torch.float32
    losses.backward(grad, retain_graph=True)
    assert seen == [memory] and x.grad.dtype == torch.bfloat16
    expected, expected_gradient = reference(rounded, labels, grad)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), expected_gradient, rtol=2**-8, atol=1e-30)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward(grad)


def test_labels_may_be_a_transposed_view(case):
    logits, labels, grad = case
    view = labels.t().contiguous().t()
    assert not view.is_contiguous()
    for result, other in zip(computed(*case), computed(logits, view, grad), strict=True):
        assert torch.equal(result, other)


@pytest.mark.usefixtures("single_process")
def test_same_loss_as_megatrons(case):
    logits, labels, grad = case
    x = logits.clone().requires_grad_()
    # megatron-core writes into its argument, if that is FP32.
    expected = tensor_parallel.vocab_parallel_cross_entropy(x * 1, labels)
    expected.backward(grad)
    group = parallel_state.get_tensor_model_parallel_group()
    losses, gradient = computed(*case, group)
    # A compiled kernel contracts multiply-adds, as FP32 rounding goes.
    torch.testing.assert_close(losses, expected, rtol=1e-6 if losses.is_cuda else 0, atol=0)
    torch.testing.assert_close(gradient, x.grad, rtol=1e-6, atol=1e-8)
