"""examples/launch/slurm.sbatch on a real Slurm: stopped, requeued, resumed, nothing lost."""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import two_nodes
from slurm_cluster import Cluster, missing
from tiny_run import ROOT, arguments_for, steps
from waiting import STOPPED, loaded, said, trained, until

# One task on each of two nodes without GPUs, instead of the script's 8 with a GPU each.
OPTIONS = ("--ntasks-per-node=1", "--gpus-per-node=0", f"--chdir={ROOT}")
ITERATIONS = 100

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"no Slurm here: {missing()}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not tmp_path: a socket's path may have 107 characters.
    folder = tempfile.TemporaryDirectory(prefix="slurm-")
    with folder as path, two_nodes("node1", "node2") as both, Cluster(Path(path), *both) as started:
        yield started


class Job:
    """A job of the script that trains the tiny model."""

    def __init__(self, cluster: Cluster, corpus: Path, folder: Path) -> None:
        self._cluster = cluster
        self._folder, self.log = folder, folder.with_suffix(".log")
        arguments = arguments_for(
            corpus, ("--fp4-recipe", "nvfp4", "--train-iters", ITERATIONS, "--save-interval", 20)
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

    def until_it_trains(self, iteration: int) -> None:
        until(lambda: trained(self.log, iteration), self.log)

    def goes_on(self, whole: dict) -> None:
        """Check that Slurm starts it again, and that it trains as if nothing had stopped it."""
        # Slurm lets it wait for two minutes: at once, slurmd would take it for the old start.
        self._cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+5")
        self.until("COMPLETED")
        assert self.now("Restarts") == "1"
        assert loaded(self.log, self._folder)
        assert steps(self._folder) == whole

    def stopped_after(self) -> int:
        assert STOPPED in said(self.log), said(self.log)
        return int(re.findall(r"saved checkpoint from iteration +(\d+)", said(self.log))[-1])


@pytest.fixture(scope="module")
def whole(cluster, corpus, tmp_path_factory) -> dict:
    """Loss and gradient norm of each iteration of a job that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    Job(cluster, corpus, folder).until("COMPLETED")
    assert len(steps(folder)) == ITERATIONS
    return steps(folder)


def test_stopped_before_its_time_is_up_it_goes_on_by_itself(cluster, corpus, whole, tmp_path):
    """The warning comes as Slurm sends it: USR1 to the batch script alone."""
    job = Job(cluster, corpus, tmp_path / "stopped")
    job.until_it_trains(3)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.until("PENDING")
    job.goes_on(whole)


def test_a_job_that_loses_a_node_goes_on_from_the_checkpoint(cluster, corpus, whole, tmp_path):
    """Slurm gives a node up that does not answer, and requeues the job; the node comes back."""
    job, node = Job(cluster, corpus, tmp_path / "lost"), cluster.nodes[1]
    job.until_it_trains(23)
    cluster.cut_off(node)
    job.until("PENDING")
    cluster.boot(node)
    job.goes_on(whole)


def test_cancelled_it_saves_and_stays_away(cluster, corpus, tmp_path):
    job = Job(cluster, corpus, tmp_path / "cancelled")
    job.until_it_trains(3)
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
