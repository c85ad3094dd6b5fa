"""Losses by other kernels than Megatron-LM's: in models, against its own, and liger-kernel's alone.

As a script this file is one rank of a job: it calls :func:`compare`.
"""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.arguments.parser import LOSSES
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.loss import cross_entropy_by, replace_losses, token_losses, use_loss
from tests.megatron.test_compatibility import hooks
from tests.megatron.tiny_models import TINY, built, one_rank

each_loss = pytest.mark.parametrize("name", LOSSES)
IGNORED = -100
BATCH, LENGTH, VOCABULARY = 2, 16, 96
COMMON = f"""
    {TINY} --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 --transformer-impl local
    --no-gradient-accumulation-fusion
"""
MODELS = {
    "GPT": "--num-layers 1 --swiglu --position-embedding-type rope",
    "GPT with MTP": "--num-layers 1 --swiglu --mtp-num-layers 1 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights",
    "hybrid with MTP": "--hybrid-layer-pattern M*-/*- --mamba-state-dim 8 --mamba-head-dim 16 "
    "--mamba-num-groups 2 --position-embedding-type none",
}
TP2 = "--tensor-model-parallel-size 2"
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="builds models on the CPU")


def exact(logits, labels, weights):
    """Return losses, gradients of their weighted sum, and probabilities times weights, in FP64."""
    x = logits.detach().double()
    log_sum = x.logsumexp(-1, keepdim=True)
    kept = (labels != IGNORED).unsqueeze(-1)
    indices = labels.clamp(min=0).unsqueeze(-1)
    losses = (log_sum - x.gather(-1, indices)) * kept
    probabilities = (x - log_sum).exp() * kept * weights.double().unsqueeze(-1)
    target = torch.zeros_like(x).scatter_(-1, indices, 1.0) * kept
    return losses[..., 0], probabilities - target * weights.unsqueeze(-1), probabilities


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("batch", "length", "vocabulary"),
    # In one block of the kernels, and in two; the last is as large as a model's.
    [(2, 5, 1000), (1, 3, 40000), pytest.param(2, 256, 32000, marks=pytest.mark.gpu)],
)
def test_liger_kernels_losses_and_gradients_are_those_of_float64(batch, length, vocabulary, dtype):
    """BF16 rounds gradients to 8 bits, FP16 to 11, with subnormal ones in steps of 2^-24.

    In FP32, subtracting the label's 1 and multiplying by the weight round once each. The
    exponential of a difference d of logits up to 40 has an error of (4 + 3 d) 2^-24 on a GPU, and
    so has the sum of exponentials.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draws = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(length, batch, vocabulary, generator=draws)
    logits = logits.to(device, dtype).requires_grad_()
    labels = torch.randint(vocabulary, (batch, length), generator=draws).to(device)
    labels[0, 1] = IGNORED
    weights = torch.rand(batch, length, generator=draws).to(device)
    weights[0, 0] = 0  # a masked token
    before = logits.detach().clone()

    losses = token_losses(cross_entropy_by("liger"), None, labels, logits)
    losses.mul(weights).sum().backward()
    expected, gradients, probabilities = exact(logits, labels.t(), weights.t())

    slack = 256 * 2.0**-24
    assert losses.dtype is torch.float32 and losses.is_contiguous()
    assert ((losses.t() - expected).abs() <= slack).all()
    assert losses[0, 1] == 0
    assert logits.grad.dtype is dtype
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype]
    rounding += 2.0**-23
    step = 2.0**-25 if dtype is torch.float16 else 0.0
    bound = rounding * gradients.abs() + 1.01 * slack * probabilities + step
    errors = (logits.grad - gradients).abs()
    assert (errors / bound.clamp(min=1e-300)).max() <= 1
    assert not logits.grad[:2, 0].any()
    assert torch.equal(logits.detach(), before)


def losses_and_gradients(model, label):
    """Return the loss of each token and the gradient of each parameter of a model.

    ``label``: the first token's.
    """
    tokens = (torch.arange(BATCH * (LENGTH + 1)) * 37 % VOCABULARY).view(BATCH, LENGTH + 1)
    labels = tokens[:, 1:].clone()
    labels[0, 0] = label
    mask = torch.ones(BATCH, LENGTH)
    mask[1, -3:] = 0
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    model.zero_grad()
    losses = model(tokens[:, :-1], positions, None, labels=labels, loss_mask=mask)
    (losses * mask).sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def compare(name: str, line: str) -> None:
    """Compare a model's losses and gradients by other kernels with those by Megatron-LM."""
    model = built(COMMON + line)
    # liger-kernel has no loss where Megatron-LM has one without a label.
    label = IGNORED if name == "lowbit" else 5
    expected, gradients = losses_and_gradients(model, label)

    calls, cross_entropy = [], cross_entropy_by(name)
    counted = lambda *given: calls.append(None) or cross_entropy(*given)  # noqa: E731
    assert replace_losses(counted, [model]) == [model]
    losses, found = losses_and_gradients(model, label)
    assert len(calls) == 1 + ("--mtp-num-layers" in line or "/" in line)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    for name, gradient in found.items():
        error = (gradient - gradients[name]).norm() / gradients[name].norm()
        assert error <= 1e-5, (name, error)


@on_a_cpu
@each_loss
@pytest.mark.parametrize("model", MODELS)
def test_models_have_megatron_lms_losses_and_gradients(model, name):
    with one_rank():
        compare(name, MODELS[model])


@on_a_cpu
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("lowbit", "--sequence-parallel"),
        pytest.param("lowbit", "", marks=pytest.mark.slow),
        pytest.param("liger", "--sequence-parallel", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_the_vocabulary_have_megatron_lms_losses(run_ranks, more, name):
    line = f"{MODELS['GPT with MTP']} {TP2} {more}"
    run_ranks(__file__, 2, name, line, timeout=100, CUDA_DEVICE_MAX_CONNECTIONS="1")


def hooks_with(name, recipe=None, fused=True):
    return hooks(recipe, cross_entropy_fusion_impl=name, cross_entropy_loss_fusion=fused)


@each_loss
@pytest.mark.parametrize("recipe", [None, ["nvfp4"]])
def test_one_hook_with_a_recipe_and_without(recipe, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    first, *others = hooks_with(name, recipe)
    assert isinstance(first, partial) and first.func is replace_losses
    assert first.args[0].__class__ is cross_entropy_by(name).__class__
    assert len(others) == len(hooks(recipe))


@each_loss
def test_the_loss_must_be_fused(name):
    with pytest.raises(UserError, match=rf"^--cross-.* {name} needs --cross-entropy-loss-fusion$"):
        hooks_with(name, fused=False)


@on_a_cpu
@each_loss
def test_a_cpu_is_refused(name):
    with pytest.raises(UserError, match=rf"^--cross-entropy-fusion-impl {name}: .* give native$"):
        hooks_with(name)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel.megatron", None)
    with pytest.raises(UserError, match=r"^--cross.* liger: .*megatron-lowbit\[liger\]'$"):
        use_loss(SimpleNamespace(pre_wrap_hooks=[]), "liger")


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    compare(*sys.argv[1:3])  # behind them: the rank
    torch.distributed.destroy_process_group()
