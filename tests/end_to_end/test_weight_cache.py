"""Caching of quantized weights over the microbatches of a step."""

import pytest
from tiny_run import done, losses

from megatron_lowbit.megatron.layer_state import LayerState
from megatron_lowbit.recipes import LinearPrecision

RECIPE = ("--fp4-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none", "--train-iters", 3)


def test_same_losses_as_without(pretrain_here, tmp_path, monkeypatch):
    done(pretrain_here(*RECIPE, "--save", tmp_path / "kept"))
    monkeypatch.setattr(LinearPrecision, "caches_weight", property(lambda call: False))
    done(pretrain_here(*RECIPE, "--save", tmp_path / "anew"))
    kept, anew = losses(tmp_path / "kept"), losses(tmp_path / "anew")
    assert len(kept) == 3 and kept == anew


def test_the_comparison_can_fail(pretrain_here, tmp_path, monkeypatch):
    done(pretrain_here(*RECIPE, "--save", tmp_path / "right"))
    monkeypatch.setattr(LayerState, "forget_weight", lambda state: None)
    done(pretrain_here(*RECIPE, "--save", tmp_path / "stale"))
    with pytest.raises(AssertionError):
        assert losses(tmp_path / "right") == losses(tmp_path / "stale")
