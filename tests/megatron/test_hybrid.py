"""megatron-core's mixer on this project's scan, against the recurrence in FP64."""

import shlex

import pytest
import torch
import torch.nn.functional as F

from megatron_lowbit.megatron.config import transformer_config
from megatron_lowbit.megatron.mamba import (
    convolve_and_scan,
    torch_scan,
    triton_scan,
)
from megatron_lowbit.megatron.models import build_model
from megatron_lowbit.kernels.engine import select_engine
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_lowbit.training.distributed import initialize_distributed, shutdown
from megatron_lowbit.training.optimizer import build_optimizer, wrap_data_parallel

MODEL = shlex.split("""
    --hybrid-override-pattern M*-M --num-layers 4 --hidden-size 64 --num-attention-heads 4
    --mamba-state-dim 8 --mamba-head-dim 16 --mamba-num-groups 2 --squared-relu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type none
    --untie-embeddings-and-output-weights --seq-length 160 --micro-batch-size 2 --train-iters 1
    --lr 1 --data-path unread --vocab-size 96
""")
HEADS, WIDTH, GROUPS, STATES, INNER = 8, 16, 2, 8, 128


@pytest.fixture
def args():
    """Parsed arguments, and a process group for them."""
    found = parse_arguments([*MODEL, "--global-batch-size", "2"])
    initialize_distributed(found)
    yield found
    shutdown()


@pytest.fixture
def build(args):
    """Builds the model in a dtype."""
    engine = select_engine(torch.device("cpu"), "reference")
    return lambda dtype: build_model(
        args, transformer_config(args, dtype), load_recipe("bf16", []), engine, 96
    )[0]


def recurrence(mixer, hidden):
    """A mixer's output in FP64, written down from the paper: hidden (s, b, h) to the same."""
    weights = {name: p.detach().double() for name, p in mixer.named_parameters()}
    z, x, b, c, dt = (hidden @ weights["in_proj.weight"].t()).split(
        [INNER, INNER, GROUPS * STATES, GROUPS * STATES, HEADS], dim=-1
    )
    xbc = torch.cat([x, b, c], -1)
    taps = weights["conv1d.weight"][:, 0]
    padded = F.pad(xbc, (0, 0, 0, 0, taps.shape[1] - 1, 0))
    xbc = sum(padded[i : i + len(xbc)] * taps[:, i] for i in range(taps.shape[1]))
    x, b, c = F.silu(xbc + weights["conv1d.bias"]).split(
        [INNER, GROUPS * STATES, GROUPS * STATES], dim=-1
    )
    x = x.unflatten(-1, (HEADS, WIDTH))
    b, c = (t.unflatten(-1, (GROUPS, STATES)).repeat_interleave(HEADS // GROUPS, 2) for t in (b, c))
    dt = F.softplus(dt + weights["dt_bias"])
    rate = -weights["A_log"].exp()
    state = x.new_zeros(x.shape[1], HEADS, WIDTH, STATES)
    ys = []
    for t in range(len(x)):
        state = (dt[t] * rate).exp()[..., None, None] * state
        state = state + (dt[t, ..., None] * x[t])[..., None] * b[t, :, :, None]
        ys.append((state * c[t, :, :, None]).sum(-1) + weights["D"][:, None] * x[t])
    y = torch.stack(ys).flatten(-2) * F.silu(z)
    groups = y.unflatten(-1, (GROUPS, -1))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-5)
    return groups.flatten(-2) * weights["norm.weight"] @ weights["out_proj.weight"].t()


def test_a_mixer_is_the_recurrence(build):
    mixer = build(torch.float32).decoder.layers[0].mixer
    draws = torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draws)
    hidden = torch.randn(160, 2, 64, generator=draws)
    y, bias = mixer(hidden)
    exact = recurrence(mixer, hidden.double())
    assert bias is None
    assert (y.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.gpu
def test_mamba_ssms_scan_agrees():
    pytest.importorskip("mamba_ssm")
    draws = torch.Generator("cuda").manual_seed(0)
    new = {"device": "cuda", "generator": draws}
    inner, channels = HEADS * 64, HEADS * 64 + 2 * GROUPS * 64
    x = torch.randn(2, 300, inner + channels + HEADS, dtype=torch.bfloat16, **new)
    weights = (
        0.3 * torch.randn(channels, 4, dtype=torch.bfloat16, **new),
        torch.zeros(channels, dtype=torch.bfloat16, device="cuda"),
        torch.rand(HEADS, **new) * 4 - 6,
        -torch.rand(HEADS, **new) * 15 - 1,
        torch.ones(HEADS, device="cuda"),
    )
    found = []
    for scan in (torch_scan, triton_scan):
        leaf = x.clone().requires_grad_()
        y = convolve_and_scan(leaf, *weights, chunk_size=128, ngroups=GROUPS, scan=scan, headdim=64)
        y.backward(torch.ones_like(y))
        found.append((y.detach().float(), leaf.grad.float()))
    for ours, theirs in zip(*found, strict=True):
        # BF16 products of sums over 128 tokens against FP32 ones.
        assert (ours - theirs).abs().max() <= 2e-2 * ours.abs().max()


def test_what_decides_the_decay_stays_fp32(build):
    named = dict(build(torch.bfloat16).named_parameters())
    fp32 = {name for name, parameter in named.items() if parameter.dtype is torch.float32}
    mixers = (0, 3)
    assert fp32 == {
        f"module.decoder.layers.{block}.mixer.{name}" for block in mixers for name in ("A_log", "D")
    }
    # Not rounded to BF16 on the way.
    rates = named["module.decoder.layers.0.mixer.A_log"].detach()
    assert not torch.equal(rates, rates.bfloat16().float())


def backward(model):
    tokens = torch.arange(320).view(2, 160) % 96
    positions = torch.arange(160).expand(2, -1)
    model(tokens, positions, attention_mask=None, labels=tokens).mean().backward()


def test_a_bf16_model_runs(build):
    model = build(torch.bfloat16)
    backward(model)
    for parameter in model.parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.any()


class Training:
    """A BF16 model, its optimizer and schedule."""

    def __init__(self, args, build):
        config = transformer_config(args, torch.bfloat16)
        (self.model,) = wrap_data_parallel(args, config, [build(torch.bfloat16)])
        self.optimizer, self.scheduler = build_optimizer(args, config, [self.model])

    def step(self):
        self.model.zero_grad_buffer()
        backward(self.model)
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.scheduler.step(1)

    def parts(self):
        return [self.model], self.optimizer, self.scheduler

    def tensors(self):
        """Parameters, FP32 main parameters and moments, in a fixed order."""
        (part,) = self.optimizer.chained_optimizers
        mains = [p for group in part.optimizer.param_groups for p in group["params"]]
        states = [part.optimizer.state[p] for p in mains]
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq", "step")]
        return [t.detach().clone() for t in (*self.model.parameters(), *mains, *moments)]


@pytest.mark.parametrize("distributed", [False, True])
def test_fp32_parameters_of_a_bf16_model_learn(args, build, distributed):
    args.use_distributed_optimizer = distributed
    training = Training(args, build)
    rates = next(p for name, p in training.model.named_parameters() if name.endswith("A_log"))
    before = rates.detach().clone()
    training.step()
    assert rates.dtype is torch.float32
    # Adam's first step is nearly the learning rate, 1 here, however small the gradient.
    assert ((before - rates) * rates.main_grad.sign() > 0.5).all()


@pytest.mark.parametrize("distributed", [False, True])
def test_a_bf16_model_resumes_to_the_bit(args, build, distributed, tmp_path):
    args.use_distributed_optimizer = distributed
    args.lr = args.init_method_std
    whole, resumed = Training(args, build), Training(args, build)
    whole.step()
    whole.step()
    save_checkpoint(tmp_path, 2, *whole.parts(), {"model": {}})
    resumed.step()  # so that it differs
    load_checkpoint(tmp_path, *resumed.parts(), {})
    for _ in range(2):
        pairs = zip(whole.tensors(), resumed.tensors(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        whole.step()
        resumed.step()
