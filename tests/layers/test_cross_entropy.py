"""Cross-entropy by this project's kernels: against float64, and what it does to its logits."""

import pytest
import torch

from megatron_lowbit.layers.cross_entropy import cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
ULP, LEAST = 2.0**-24, 2.0**-126
OUTSIDE = -100


def labels_of(shape, columns, draws):
    """Return labels, of which the first are at both ends and outside of the vocabulary."""
    labels = torch.randint(columns, shape, generator=draws)
    labels.view(-1)[:3] = torch.tensor([0, columns - 1, OUTSIDE])
    return labels.to(DEVICE)


def case(shape=(3, 2), columns=1000, dtype=torch.bfloat16):
    """Return logits, labels and weights of losses, of which the fourth is 0, a masked token's."""
    draws = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(*shape, columns, generator=draws)).to(DEVICE, dtype)
    weights = torch.rand(shape, generator=draws)
    weights.view(-1)[3] = 0
    labels = labels_of(shape, columns, draws)
    return logits.requires_grad_(), labels, weights.to(DEVICE)


def exact(x, labels):
    """Return losses, their gradients, and probabilities of logits x in FP64."""
    log_sum = x.logsumexp(-1, keepdim=True)
    known = (labels >= 0).unsqueeze(-1)
    own = labels.clamp(min=0).unsqueeze(-1)
    losses = log_sum - torch.where(known, x.gather(-1, own), x.amax(-1, keepdim=True))
    probabilities = (x - log_sum).exp()
    target = torch.zeros_like(x).scatter_(-1, own, 1.0) * known
    return losses[..., 0], probabilities - target, probabilities


def check(logits, labels, weights):
    """Compare losses and gradients with float64.

    Errors of an exponential are in ulps of FP32, 4 of the GPU's function and 3 of each unit of the
    difference in it: the difference is rounded, log2(e) is, and so is their product. Those of a sum
    are the mean of its terms' and 32 of additions. Losses and gradients take a few operations more;
    gradients are rounded to their type, whose least numbers have an absolute error.
    """
    x = logits.detach().double()
    expected, gradients, probabilities = exact(x, labels)
    of_terms = 4 + 3 * (x.amax(-1, keepdim=True) - x)
    of_sum = (of_terms * probabilities).sum(-1, keepdim=True) + 32
    losses = cross_entropy(logits, labels, None)
    assert losses.dtype is torch.float32 and losses.shape == labels.shape
    assert ((losses - expected).abs() <= ULP * (of_sum[..., 0] + 4 * expected.abs())).all()
    losses.mul(weights).sum().backward()
    dtype, scale = logits.dtype, weights.unsqueeze(-1)
    assert logits.grad.dtype is dtype and logits.grad.shape == logits.shape
    bound = (
        ULP * probabilities * (of_terms + of_sum + 4) + (ROUNDING[dtype] + ULP) * gradients.abs()
    )
    least = 2.0**-25 if dtype is torch.float16 else LEAST
    assert ((logits.grad - gradients * scale).abs() <= 1.01 * bound * scale + least).all()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("shape", "columns"),
    # A part of a block; rows that are not aligned; blocks and a part; whole blocks.
    [
        ((5, 2), 100),
        ((3, 2), 1003),
        ((2, 2), 9000),
        ((2, 2), 8192),
        pytest.param((512, 1), 32000, marks=pytest.mark.gpu),
    ],
)
def test_losses_and_gradients_are_those_of_float64(shape, columns, dtype):
    logits, labels, weights = case(shape, columns, dtype)
    check(logits, labels, weights)
    assert not logits.grad.view(-1, columns)[3].any()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [0.0, 1e4, -1e4])
def test_equal_logits_and_logits_of_any_size(size, dtype):
    """Equal logits, then logits of both signs with the largest or the smallest as the label."""
    logits, labels, weights = case(columns=1003, dtype=dtype)
    with torch.no_grad():
        logits.copy_(torch.where(logits > 0, size, -size))
        logits[0] = size
    check(logits, labels, weights)


def test_a_loss_of_logits_that_are_no_numbers_is_none():
    logits, labels, _ = case()
    with torch.no_grad():
        logits[0, 1, 7], logits[1, 0, 7] = float("nan"), float("inf")
    losses = cross_entropy(logits, labels, None)
    losses.sum().backward()
    bad = torch.zeros_like(labels, dtype=torch.bool)
    bad[0, 1] = bad[1, 0] = True
    assert torch.equal(losses.isnan(), bad) and torch.equal(logits.grad.isnan().any(-1), bad)


def test_the_gradient_takes_the_memory_of_the_logits():
    logits, labels, weights = case()
    cross_entropy(logits, labels, None).mul(weights).sum().backward()
    assert logits.grad.data_ptr() == logits.data_ptr()


def test_expanded_labels_and_gradients_of_losses():
    logits, _, _ = case()
    copy = logits.detach().clone().requires_grad_()
    labels = torch.tensor(5, device=DEVICE).expand(3, 2)
    cross_entropy(logits, labels, None).sum().backward()
    cross_entropy(copy, labels.contiguous(), None).backward(torch.ones(3, 2, device=DEVICE))
    assert torch.equal(logits.grad, copy.grad)


@pytest.mark.parametrize(
    "stride",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.nn.functional.pad(x, (0, 3))[..., :-3],  # which can be flattened by a view
    ],
)
def test_logits_that_are_not_contiguous_are_copied(stride):
    logits, labels, weights = case()
    strided = stride(logits.detach()).requires_grad_()
    assert not strided.is_contiguous()
    before = strided.detach().clone()
    losses = [cross_entropy(x, labels, None) for x in (logits, strided)]
    for each in losses:
        each.backward(weights)
    assert torch.equal(*losses) and torch.equal(strided.grad, logits.grad)
    assert torch.equal(strided.detach(), before)


def test_logits_cannot_be_read_after_backward():
    """A second pass raises an error, as does another operation that comes later in backward."""
    logits, labels, _ = case()
    loss, other = cross_entropy(logits, labels, None).sum(), logits.square().sum()
    loss.backward(retain_graph=True)
    for later in (loss, other):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward()


def test_losses_without_gradients_leave_the_logits():
    logits, labels, _ = case()
    before = logits.detach().clone()
    with torch.no_grad():
        losses = cross_entropy(logits, labels, None)
    assert not losses.requires_grad and torch.equal(logits, before)


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_logits():
    logits = torch.zeros(65540, 1, 32776, dtype=torch.bfloat16, device=DEVICE)
    logits[-1] = last = 4 * torch.randn(1, 32776, device=DEVICE).bfloat16()
    labels = torch.full(logits.shape[:2], 5, device=DEVICE)
    losses = cross_entropy(logits.requires_grad_(), labels, None)
    losses.sum().backward()
    expected, gradients, _ = exact(last.double(), labels[-1])
    torch.testing.assert_close(losses[-1].double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits.grad[-1].double(), gradients, rtol=2.0**-8, atol=1e-8)
