"""Losses with --fused-allreduce-norm on a CPU compared with separate layers."""

import pytest
from tiny_run import losses

TWO = ("--tensor-model-parallel-size", 2, "--train-iters", 4)
FUSED = ("--precision-recipe", "bf16", "--fused-allreduce-norm")
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform",
              "--recompute-num-layers", 1)  # fmt: skip


@pytest.mark.slow
def test_the_same_losses(pretrain_ranks, tmp_path):
    """The separate layers resume from the fused run's checkpoint."""
    runs = {
        "plain": TWO,
        "half": (*TWO, *FUSED, "--exit-interval", 2),
        "resumed": (*TWO, "--load", tmp_path / "half"),
    }
    pretrain_ranks({name: (*run, "--save", tmp_path / name) for name, run in runs.items()})
    seen = {name: losses(tmp_path / name) for name in runs}
    assert seen["plain"].keys() == {1, 2, 3, 4}
    assert seen["half"] == pytest.approx({n: seen["plain"][n] for n in (1, 2)}, abs=2e-4)
    assert seen["resumed"] == pytest.approx({n: seen["plain"][n] for n in (3, 4)}, abs=2e-4)


@pytest.mark.slow
def test_the_same_losses_under_a_recipe(pretrain_ranks, tmp_path):
    """The norms differ in their last bits, which changes some codes."""
    # MXFP8's blocks are 32 wide: the tiny model's rows hold two.
    recipe = ("--precision-recipe", "mxfp8")
    runs = {"plain": (*TWO, *recipe), "fused": (*TWO, *recipe, "--fused-allreduce-norm")}
    pretrain_ranks({name: (*run, "--save", tmp_path / name) for name, run in runs.items()})
    seen = {name: losses(tmp_path / name) for name in runs}
    assert seen["fused"] == pytest.approx(seen["plain"], abs=1e-2)


@pytest.mark.slow
def test_the_same_losses_recomputed(pretrain_ranks, tmp_path):
    runs = {"fused": (*TWO, *FUSED), "recomputed": (*TWO, *FUSED, *RECOMPUTED)}
    pretrain_ranks({name: (*run, "--save", tmp_path / name) for name, run in runs.items()})
    seen = {name: losses(tmp_path / name) for name in runs}
    assert seen["recomputed"] == pytest.approx(seen["fused"], abs=2e-4)
