"""Caching of quantized weights over the microbatches of a step."""

from collections.abc import Callable

import pytest
from tiny_run import done, losses

from megatron_lowbit.megatron.layers.state import LayerState
from megatron_lowbit.recipes import LinearPrecision

RECIPE = ("--fp4-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none", "--train-iters", 2)


@pytest.fixture
def train(pretrain_here, tmp_path_factory) -> Callable[[], dict[int, float]]:
    """Function that trains and returns the losses."""

    def run() -> dict[int, float]:
        save = tmp_path_factory.mktemp("run")
        done(pretrain_here(*RECIPE, "--save", save))
        return losses(save)

    return run


@pytest.fixture
def kept(memory, train) -> dict[int, float]:
    """Losses with the cache."""
    if not memory:
        memory["kept"] = train()
    return memory["kept"]


@pytest.mark.slow
def test_same_losses_as_without(kept, train, monkeypatch):
    monkeypatch.setattr(LinearPrecision, "caches_weight", property(lambda call: False))
    assert len(kept) == 2 and kept == train()


def test_the_comparison_can_fail(kept, train, monkeypatch):
    monkeypatch.setattr(LayerState, "forget_weight", lambda state: None)
    assert kept != train()
