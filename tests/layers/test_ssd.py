"""The chunked scan against the recurrence that defines it, one token after another in FP64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lowbit.layers.ssd import causal_convolution, grouped_rms_norm, ssd


def recurrence(x, dt, a, b, c, d):
    batch, length, heads, width = x.shape
    b, c = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (b, c))
    state = x.new_zeros(batch, heads, width, b.shape[-1])
    ys = []
    for t in range(length):
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        ys.append(
            (state * c[:, t, :, None]).sum(-1) + (d if d.dim() == 2 else d[:, None]) * x[:, t]
        )
    return torch.stack(ys, 1)


def draws(length, groups, wide_skip=False, dtype=torch.float64):
    g = torch.Generator().manual_seed(length)
    batch, heads, width, states = 2, 4, 8, 16
    x = torch.randn(batch, length, heads, width, generator=g)
    dt = F.softplus(torch.randn(batch, length, heads, generator=g) - 2)
    a = -torch.empty(heads).uniform_(1, 16, generator=g)
    b, c = torch.randn(2, batch, length, groups, states, generator=g)
    d = torch.randn(heads, width, generator=g) if wide_skip else torch.randn(heads, generator=g)
    return [t.to(dtype).requires_grad_() for t in (x, dt, a, b, c, d)]


@pytest.mark.parametrize(("groups", "wide_skip"), [(1, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("length", [1, 16, 63, 200])
def test_scan_and_gradients(length, groups, wide_skip):
    exact_inputs = draws(length, groups, wide_skip)
    exact = recurrence(*exact_inputs)
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).double()
    exact_gradients = torch.autograd.grad((exact * weights).sum(), exact_inputs)
    inputs = [t.detach().float().requires_grad_() for t in exact_inputs]
    y = ssd(*inputs, chunk_size=32 if wide_skip else 16)
    gradients = torch.autograd.grad((y * weights.float()).sum(), inputs)
    assert y.dtype == torch.float32
    for got, want in zip((y, *gradients), (exact, *exact_gradients), strict=True):
        assert (got.double() - want).abs().max() <= 1e-5 * want.abs().max()


def test_strong_decay_stays_finite():
    x, dt, a, b, c, d = (t.detach().float() for t in draws(64, 1))
    y = ssd(x, dt + 30, a * 10, b, c, d, chunk_size=32)
    # Nothing of the past is left.
    own = (b * c).sum(-1)[..., None] * (dt + 30)[..., None] * x + d[:, None] * x
    assert (y - own).abs().max() <= 1e-6 * own.abs().max()


def test_convolution_sees_the_past_alone():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 6, generator=g)
    weight, bias = torch.randn(6, 4, generator=g), torch.randn(6, generator=g)
    y = causal_convolution(x, weight, bias)
    for t in range(9):
        past = [x[:, t - 3 + i] if t - 3 + i >= 0 else torch.zeros(2, 6) for i in range(4)]
        want = F.silu(sum(past[i] * weight[:, i] for i in range(4)) + bias)
        torch.testing.assert_close(y[:, t], want)


@pytest.mark.parametrize("gated", [False, True])
def test_grouped_norm(gated):
    g = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(3, 8, generator=g) for _ in range(3))
    y = grouped_rms_norm(x, weight[0], gate if gated else None, 4, 1e-5)
    value = x * F.silu(gate) if gated else x
    for group in (slice(0, 4), slice(4, 8)):
        want = F.rms_norm(value[:, group], (4,), weight[0, group], 1e-5)
        torch.testing.assert_close(y[:, group], want)
