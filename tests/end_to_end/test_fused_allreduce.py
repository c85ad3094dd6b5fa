"""--fused-allreduce-norm on a CPU: the losses of the layers it replaces, and what it refuses."""

import re

import pytest

TWO = ("--tensor-model-parallel-size", 2, "--train-iters", 4)
LOSS = re.compile(r"iteration +(\d+)/4 \| loss ([\d.]+)")


def losses(result) -> dict[str, float]:
    assert result.returncode == 0, result.stderr
    return {number: float(loss) for number, loss in LOSS.findall(result.stdout)}


RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform",
              "--recompute-num-layers", 1)  # fmt: skip


@pytest.mark.parametrize("more", [(), RECOMPUTED], ids=["", "recomputed"])
def test_the_same_losses(pretrain_command, tmp_path, more):
    """Also on the other's checkpoint: norms keep their names."""
    plain, fused, back = tmp_path / "plain", tmp_path / "fused", tmp_path / "back"
    expected = losses(
        pretrain_command(*TWO, *more, "--save-interval", 2, "--save", plain, processes=2)
    )
    result = pretrain_command(
        *TWO, *more, "--save", fused, "--save-interval", 2, "--fused-allreduce-norm", processes=2
    )
    assert "8 fused all-reduces in forward on rank 0: torch.distributed" in result.stdout
    seen = losses(result)
    assert seen.keys() == expected.keys() == {"1", "2", "3", "4"}
    assert seen == pytest.approx(expected, abs=2e-4)
    (fused / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = losses(pretrain_command(*TWO, *more, "--load", fused, "--save", back, processes=2))
    assert resumed == pytest.approx({n: expected[n] for n in ("3", "4")}, abs=2e-4)


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
    result = pretrain_here(*TWO, "--fused-allreduce-norm", *more)
    assert result.returncode == 2
    assert f"--fused-allreduce-norm needs {named}" in result.stderr.replace("a model ", "")
