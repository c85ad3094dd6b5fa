"""--fused-allreduce-norm on a CPU: the losses of the layers it replaces, and what it refuses."""

import pytest
from tiny_run import losses

TWO = ("--tensor-model-parallel-size", 2, "--train-iters", 4)
FUSED = "--fused-allreduce-norm"
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform",
              "--recompute-num-layers", 1)  # fmt: skip


@pytest.mark.slow
def test_the_same_losses(pretrain_ranks, tmp_path):
    """By the layers it replaces from its checkpoint on."""
    runs = {
        "plain": TWO,
        "half": (*TWO[:-1], 2, FUSED, "--log-file-dir", tmp_path),
        "resumed": (*TWO, "--load", tmp_path / "half"),
    }
    pretrain_ranks({name: (*run, "--save", tmp_path / name) for name, run in runs.items()})
    seen = {name: losses(tmp_path / name) for name in runs}
    assert seen["plain"].keys() == {1, 2, 3, 4}
    assert seen["half"] == pytest.approx({n: seen["plain"][n] for n in (1, 2)}, abs=2e-4)
    said = (tmp_path / "rank_00000.log").read_text()
    assert "8 fused all-reduces in forward on rank 0: torch.distributed" in said
    assert seen["resumed"] == pytest.approx({n: seen["plain"][n] for n in (3, 4)}, abs=2e-4)


@pytest.mark.slow
def test_the_same_losses_recomputed(pretrain_ranks, tmp_path):
    runs = {"fused": (*TWO, FUSED), "recomputed": (*TWO, FUSED, *RECOMPUTED)}
    pretrain_ranks({name: (*run, "--save", tmp_path / name) for name, run in runs.items()})
    seen = {name: losses(tmp_path / name) for name in runs}
    assert seen["recomputed"] == pytest.approx(seen["fused"], abs=2e-4)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--tensor-model-parallel-size", 1), "--tensor-model-parallel-size above 1"),
        (("--sequence-parallel",), "without --sequence-parallel"),
        (("--normalization", "LayerNorm"), "--normalization RMSNorm"),
        (("--normalization", "MXNorm"), "--normalization RMSNorm"),
        (("--hidden-dropout", 0.1), "--hidden-dropout 0"),
        (("--num-experts", 2, "--sequence-parallel"), "without --sequence-parallel"),
    ],
)
def test_what_does_not_fit_is_refused(pretrain_here, more, named):
    result = pretrain_here(*TWO, FUSED, *more)
    assert result.returncode == 2
    assert f"--fused-allreduce-norm needs {named}" in result.stderr.replace("a model ", "")
