"""Two processes of which one dies or hangs: a prompt end with a clear message, or a restart."""

import re
import subprocess
import sys
import time
from pathlib import Path

import dying_rank
import pytest
from tiny_run import ENVIRONMENT, arguments_for, steps

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def job(corpus: Path, harm: str, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess:
    """Rank 1 of two is harmed in iteration 4."""
    launcher = [*TORCHRUN, "--max-restarts", str(restarts), dying_rank.__file__, harm, "4"]
    command = [*launcher, *arguments_for(corpus, ("--train-iters", 6, *arguments))]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def seconds_since(result: subprocess.CompletedProcess) -> float:
    return time.time() - float(re.search(r"harmed at (\S+)", result.stdout)[1])


def test_a_rank_dies(corpus):
    """The other's collective fails; it does not wait for torchrun to kill it after 30 seconds."""
    result = job(corpus, "dies")
    assert seconds_since(result) < 25
    assert result.returncode == 1
    assert re.search(r"error: rank 0: lost another rank in iteration 4: .*--load", result.stderr)
    assert "iteration 3/6" in result.stdout and "iteration 4/6" not in result.stdout


@pytest.mark.slow
def test_a_rank_hangs(corpus):
    """Both end, as both make no progress; what they say tells which one waits for the other."""
    result = job(corpus, "hangs", "--distributed-timeout-minutes", "0.2")
    assert seconds_since(result) > 11  # how much more than 12 depends on how busy the machine is
    assert result.returncode == 1
    no_progress = r"error: rank {}: no progress for 0.2 minutes in iteration 4, {}"
    culprit = no_progress.format(1, r"at dying_rank.py:\d+ in hang; --distributed-timeout-minutes")
    assert re.search(culprit, result.stderr), result.stderr
    others = re.findall(no_progress.format(0, ".*"), result.stderr)
    assert all("waiting for other ranks" in line for line in others), result.stderr
    assert "most recent call first" in result.stderr


@pytest.mark.slow
def test_a_restart_goes_on_from_the_newest_checkpoint(corpus, tmp_path):
    """To the bit as if nothing had happened, with iteration 3 made twice."""
    whole, harmed = tmp_path / "whole", tmp_path / "harmed"
    options = ("--fp4-recipe", "nvfp4", "--save-interval", "2")
    result = job(corpus, "nothing", *options, "--save", whole)
    assert result.returncode == 0, result.stderr[-3000:]
    result = job(corpus, "dies", *options, "--save", harmed, "--load", harmed, restarts=1)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"loaded {harmed} at iteration 2" in result.stdout
    assert "error: rank 0: lost another rank in iteration 4" in result.stderr
    assert steps(harmed) == steps(whole) and len(steps(whole)) == 6
