"""examples/launch/slurm.sbatch on a real Slurm: stopped, requeued, resumed, nothing lost."""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, missing
from tiny_run import ROOT, arguments_for, steps
from waiting import STOPPED, loaded, said, trained, until

# Two tasks on one node without GPUs, instead of the script's 16 on two with 8 each.
OPTIONS = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", f"--chdir={ROOT}")
ITERATIONS = 100

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"no Slurm here: {missing()}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not tmp_path: a socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Cluster(Path(folder)) as started:
        yield started


class Job:
    """A job of the script that trains the tiny model."""

    def __init__(self, cluster: Cluster, corpus: Path, folder: Path) -> None:
        self._cluster = cluster
        self.log = folder.with_suffix(".log")
        arguments = arguments_for(
            corpus, ("--fp4-recipe", "nvfp4", "--train-iters", ITERATIONS, "--save-interval", 50)
        )
        self.number = cluster.run(
            "sbatch", "--parsable", *OPTIONS, f"--output={self.log}",
            str(ROOT / "examples/launch/slurm.sbatch"), str(folder), "pretrain_gpt.py", *arguments,
            PYTHON=sys.executable, OMP_NUM_THREADS="1",
        )  # fmt: skip

    def now(self, field: str) -> str:
        return self._cluster.job(self.number)[field]

    def until(self, state: str) -> None:
        until(lambda: self.now("JobState") == state, self.log)

    def until_it_trains(self) -> None:
        until(lambda: trained(self.log, 3), self.log)

    def stopped_after(self) -> int:
        assert STOPPED in said(self.log), said(self.log)
        return int(re.findall(r"saved checkpoint from iteration +(\d+)", said(self.log))[-1])


def test_stopped_before_its_time_is_up_it_goes_on_by_itself(cluster, corpus, tmp_path):
    """The warning comes as Slurm sends it: USR1 to the batch script alone."""
    job = Job(cluster, corpus, tmp_path / "stopped")
    job.until_it_trains()
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.until("PENDING")
    # Slurm lets a requeued job wait for two minutes: at once, slurmd would take it for the old one.
    cluster.run("scontrol", "update", f"JobId={job.number}", "StartTime=now+5")
    job.until("COMPLETED")
    assert job.now("Restarts") == "1"
    assert loaded(job.log, tmp_path / "stopped")

    Job(cluster, corpus, tmp_path / "whole").until("COMPLETED")
    whole = steps(tmp_path / "whole")
    assert steps(tmp_path / "stopped") == whole and len(whole) == ITERATIONS


def test_cancelled_it_saves_and_stays_away(cluster, corpus, tmp_path):
    job = Job(cluster, corpus, tmp_path / "cancelled")
    job.until_it_trains()
    cluster.run("scancel", job.number)
    job.until("CANCELLED")
    until(lambda: STOPPED in said(job.log), job.log)
    iteration = job.stopped_after()
    assert (tmp_path / "cancelled" / f"iter_{iteration:07d}").is_dir()
    assert job.now("Restarts") == "0"


def test_a_failed_run_is_not_requeued(cluster, tmp_path):
    job = Job(cluster, tmp_path / "no corpus", tmp_path / "failed")
    job.until("FAILED")
    assert job.now("Restarts") == "0"
    assert "error: " in said(job.log)
