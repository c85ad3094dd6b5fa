"""Runs that are killed, also during a save, or stopped by a signal.

A killed run is started again with the same command, as a launcher would.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed.run
from tiny_run import ENVIRONMENT, HYBRID, ONE_MICROBATCH, ROOT, arguments_for, done, refused, steps

from megatron_lowbit.storage.files import TRACKER, last_saved, write_tracker
from megatron_lowbit.storage.lock import LOCK, FolderLock
from tests import processes
from tests.marks import others_slow

LENGTH = 16
NVFP4 = ("--fp4-recipe", "nvfp4", "--hidden-dropout", 0.1, "--train-iters", LENGTH,
         "--save-interval", 1, *ONE_MICROBATCH)  # fmt: skip
TWO_RANKS = ("--global-batch-size", 4)
SCRIPT = Path(__file__).with_name("run_script.py")
TORCHRUN = ("--standalone", "--monitor-interval", "0.1", "--max-restarts", "9",
            "--nproc-per-node", 2, ROOT / "pretrain_gpt.py")  # fmt: skip


@pytest.fixture
def start(corpus, start_script):
    """Function that starts a run that prints to a file in the folder of ``save``."""

    def run(save: Path, *arguments: object, launcher: tuple = (SCRIPT,)) -> BaseProcess:
        given = arguments_for(corpus, (*NVFP4, "--save", save, "--load", save, *arguments))
        save.parent.mkdir(parents=True, exist_ok=True)
        return start_script(*launcher, *given, output=printed_by(save))

    return run


def printed_by(save: Path) -> Path:
    return save.with_name(f"{save.name}.log")


def finish(process: BaseProcess, save: Path) -> str:
    (code,), output = processes.finish([process], timeout=240), printed_by(save).read_text()
    assert code == 0, output[-3000:]
    return output


def wait_until(process: BaseProcess, save: Path, reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not reached():
        assert process.is_alive(), printed_by(save).read_text()[-3000:]
        assert time.monotonic() < end, printed_by(save).read_text()[-3000:]
        time.sleep(0.01)


def kill(process: BaseProcess) -> None:
    """Kill a run and the processes that it started, like the loss of a machine."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it leads no group yet, and has started nothing
        process.kill()
    process.join()


def named(save: Path) -> int:
    """Return the iteration in the tracker file; if it is empty, the one that a start writes."""
    tracker = save / TRACKER
    text = tracker.read_text().strip() if tracker.exists() else "0"
    return int(text) if text else last_saved(save) or 0


def saved_above(save: Path, iteration: int) -> Callable[[], bool]:
    return lambda: named(save) > iteration


@pytest.fixture
def uninterrupted(memory, pretrain_here, tmp_path_factory) -> Path:
    """Folder of an uninterrupted run in this process."""
    if not memory:
        memory["save"] = tmp_path_factory.mktemp("uninterrupted") / "save"
        done(pretrain_here(*NVFP4, "--save", memory["save"]))
    return memory["save"]


def check_same(save: Path, uninterrupted: Path, last: int) -> None:
    """Compare a run's files with the uninterrupted run's; the last kill came after ``last``."""
    made, whole = steps(save), steps(uninterrupted)
    # The last iterations before the loss of a machine may have been saved and not yet written down.
    assert made == {step: whole[step] for step in made}
    assert made.keys() >= set(range(last + 1, LENGTH + 1))
    assert named(save) == LENGTH
    assert not [*save.glob(".iter_*")]


def check_killed(
    start: Callable, save: Path, uninterrupted: Path, kills: int, *options: object
) -> None:
    """Kill a run repeatedly, let it finish, and compare its files."""
    print("moments", seed := random.randrange(1 << 30))
    draws, last = random.Random(seed), named(save)
    for _ in range(kills):
        process = start(save, *options)
        wait_until(process, save, saved_above(save, last))
        # An iteration and its save together take about a tenth of a second.
        time.sleep(draws.uniform(0.0, 0.15))
        kill(process)
        last = named(save)
        assert last < LENGTH, "too late to be killed: let the run have more iterations"
    finish(start(save, *options), save)
    check_same(save, uninterrupted, last)


def go_back(uninterrupted: Path, save: Path) -> None:
    """Make the folder of a run that resumes from iteration 1 and saves the others again.

    Those of before hold something else: iteration 1 under other names.
    """
    first = uninterrupted / "iter_0000001"
    for number in range(1, LENGTH + 1):
        shutil.copytree(first, save / f"iter_{number:07d}")
    write_tracker(save, 1)


def check_killed_while_indexing(start: Callable, save: Path, kills: int, *options: object) -> None:
    """Kill a run during the construction of sample indices."""
    cache = save.with_name("cache")
    for _ in range(kills):
        process = start(save, *options, "--data-cache-path", cache)
        before = len([*cache.rglob("*")])
        wait_until(process, save, lambda n=before: len([*cache.rglob("*")]) > min(n, 5))
        kill(process)


@pytest.mark.slow
def test_killed_at_a_random_moment(start, tmp_path, uninterrupted):
    """The run may be killed during a save. It resumes from a complete checkpoint.

    Iterations are saved again, over checkpoints from before the resumption.
    """
    save = tmp_path / "save"
    go_back(uninterrupted, save)
    check_killed_while_indexing(start, save, 1)
    check_killed(start, save, uninterrupted, 1, "--data-cache-path", tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True], ids=["", "saved again"])
@pytest.mark.parametrize("part", range(2))
def test_killed_often(start, tmp_path, uninterrupted, replaced, part):
    save = tmp_path / "save"
    if replaced:
        go_back(uninterrupted, save)
    check_killed(start, save, uninterrupted, 4)


@pytest.mark.slow
def test_a_hybrid_is_killed(start, tmp_path):
    whole = tmp_path / "whole" / "save"
    finish(start(whole, *HYBRID), whole)
    check_killed(start, tmp_path / "save", whole, 4, *HYBRID)


@pytest.mark.slow
def test_killed_while_it_builds_indices(start, tmp_path, uninterrupted):
    save = tmp_path / "save"
    check_killed_while_indexing(start, save, 4)
    finish(start(save, "--data-cache-path", tmp_path / "cache"), save)
    check_same(save, uninterrupted, 0)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Return the processes of torchrun's ranks in the order of their start."""
    ranks = []
    for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # It has ended since.
            if b"pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(int(pid))
    return sorted(ranks)


@pytest.mark.slow
def test_one_of_two_ranks_is_killed(start, tmp_path):
    """The launcher ends the other rank and restarts both."""
    whole, save = tmp_path / "whole" / "save", tmp_path / "save"
    launcher = (torch.distributed.run.__file__, *TORCHRUN)
    finish(start(whole, *TWO_RANKS, launcher=launcher), whole)
    print("moments", seed := random.randrange(1 << 30))
    draws, last = random.Random(seed), 0
    process = start(save, *TWO_RANKS, launcher=launcher)
    for turn in range(4):
        wait_until(process, save, saved_above(save, last))
        time.sleep(draws.uniform(0.0, 0.15))
        ranks = ranks_of(process)
        os.kill(ranks[turn % 2], signal.SIGKILL)
        wait_until(process, save, lambda old=ranks: not set(old) & set(ranks_of(process)))
        last = named(save)
        assert last < LENGTH, "too late to be killed: let the run have more iterations"
    finish(process, save)
    check_same(save, whole, last)


HOLD = f"""
import sys, time
from pathlib import Path
from {FolderLock.__module__} import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print(flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("ranks", others_slow([1, 2], [1]))
def test_a_folder_that_another_run_saves_into(tmp_path, pretrain_here, pretrain_ranks, ranks):
    """All ranks refuse it before they change the folder."""
    save = tmp_path / "save"
    save.mkdir()
    (save / "metrics.jsonl").write_text(json.dumps({"iteration": 9, "lm_loss": 1.0}) + "\n")
    command = [sys.executable, "-c", HOLD, str(save)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as other:
        other.stdout.readline()
        before = {path.name: path.read_text() for path in save.iterdir()}
        if ranks == 1:
            error = refused(pretrain_here(*NVFP4, "--save", save))
        else:
            folder = pretrain_ranks(
                {"second": (*NVFP4, *TWO_RANKS, "--save", save)}, refused=("second",)
            )
            errors = {path.read_text() for path in folder.glob("*.error")}
            error = f"error: {errors.pop()}"
            assert not errors
        other.kill()
    assert error.startswith(
        f"error: --save {save}: in use by process {other.pid} on {socket.gethostname()}; "
    )
    assert {path.name: path.read_text() for path in save.iterdir()} == before
    assert before.keys() == {LOCK, "metrics.jsonl"}


@pytest.mark.slow
def test_told_to_stop(start, tmp_path, pretrain_here, uninterrupted):
    """Megatron-LM's signal handler saves a checkpoint and exits with code 0."""
    save = tmp_path / "save"
    process = start(save, "--exit-signal-handler")
    wait_until(process, save, saved_above(save, 1))
    os.kill(process.pid, signal.SIGTERM)
    output = finish(process, save)
    assert "exiting program after receiving SIGTERM" in output
    assert max(steps(save)) == named(save) < LENGTH
    done(pretrain_here(*NVFP4, "--save", save, "--load", save))
    assert steps(save) == steps(uninterrupted)
