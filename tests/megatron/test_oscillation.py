"""Masters of mixed precision: they are reset, and the BF16 weights with them."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.megatron.features import oscillation
from megatron_lowbit.numerics import quantize
from megatron_lowbit.numerics.oscillation import OscillationReset
from megatron_lowbit.recipes import HIGH_PRECISION, load_recipe

FP4 = load_recipe("quartet2").configs["nvfp4"]


@pytest.fixture
def layer():
    """A linear layer in BF16 with an FP32 master, as Megatron-LM's optimizer makes it."""
    built = torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    built.weight.main_param = built.weight.detach().float()
    engine = select_engine(torch.device("cpu"), "reference")
    plan = SimpleNamespace(layer=SimpleNamespace(path="fc"), precision=FP4, engine=engine)
    built.layer_state = SimpleNamespace(plan=plan)
    return built


@pytest.fixture
def resets(layer, monkeypatch):
    """Resets after two iterations of motion, and the shares that they log."""
    monkeypatch.setattr(oscillation, "_log", lambda *counts: logged.append(counts))
    logged = []
    reset = OscillationReset(start=1, period=9, over=2, ratio=2.0)
    run = SimpleNamespace(recipe=SimpleNamespace(oscillation=reset), iterations=100, chunks=[layer])
    return oscillation.OscillationResets(run), logged


def move(layer, iteration: int) -> None:
    """Move master weights by steps that BF16 mostly does not see."""
    generator = torch.Generator().manual_seed(iteration)
    master = layer.weight.main_param
    master += 1e-3 * torch.randn(master.shape, generator=generator)
    with torch.no_grad():
        layer.weight.copy_(master)


def test_masters_are_reset(layer, resets):
    """Motion is the masters'; quantized are the BF16 weights."""
    measured, logged = resets
    masters, values = [], []
    for iteration in range(4):
        move(layer, iteration)
        masters.append(layer.weight.main_param.clone())
        values.append(quantize(layer.weight.detach(), "quartet2").dequantize())
        measured.begin_step(iteration, training=False)  # a validation measures nothing
        measured.begin_step(iteration, training=True)
    ways = [(p[2] - p[1]).abs() + (p[3] - p[2]).abs() for p in (masters, values)]
    oscillates = ways[1] / ways[0] >= 2.0
    expected = torch.where(oscillates, values[3], masters[3])
    assert torch.equal(layer.weight.main_param, expected)
    assert torch.equal(layer.weight, expected.bfloat16())
    assert 0 < oscillates.sum() < oscillates.numel()
    assert logged == [(int(oscillates.sum()), 16 * 32, 3)]


@pytest.mark.parametrize("following", [4, 10])
def test_a_reset_whose_iteration_is_skipped_comes_next(layer, resets, following):
    """Also where the next measurement begins there."""
    measured, logged = resets
    for iteration in (0, 1, 2, following):
        move(layer, iteration)
        measured.begin_step(iteration, training=True)
    assert [iteration for *_, iteration in logged] == [following]
    assert bool(measured._paths) == (following == 10)
    for iteration in (following + 1, following + 2):
        move(layer, iteration)
        measured.begin_step(iteration, training=True)
    assert [iteration for *_, iteration in logged[1:]] == ([12] if following == 10 else [])


def test_a_layer_in_high_precision_is_not_reset(layer, resets):
    """Also one that a switch brings there within the measurement."""
    measured, logged = resets
    for iteration in range(4):
        move(layer, iteration)
        if iteration == 2:
            layer.layer_state.plan.precision = HIGH_PRECISION
        before = layer.weight.main_param.clone()
        measured.begin_step(iteration, training=True)
        assert torch.equal(layer.weight.main_param, before)
    assert logged == [(0, 0, 3)]
