"""What a run survives: being killed, also while it saves, being told to stop, and what it does not.

A killed run is started again with the same command, as a launcher would.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import ENVIRONMENT, ROOT, arguments_for, steps

from megatron_lowbit.checkpoints.files import TRACKER, complete_iterations

LENGTH = 16
NVFP4 = ("--fp4-recipe", "nvfp4", "--hidden-dropout", 0.1, "--train-iters", LENGTH,
         "--save-interval", 1)  # fmt: skip
ASYNC = ("--async-save", "--async-strategy", "mcore")


def start(corpus: Path, save: Path, *arguments: object) -> subprocess.Popen:
    """Start a run, which prints to a file beside ``save``: nobody empties a pipe meanwhile."""
    given = (*NVFP4, "--save", save, "--load", save, *arguments)
    with printed_by(save).open("w") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *arguments_for(corpus, given)],
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def printed_by(save: Path) -> Path:
    return save.with_name(f"{save.name}.log")


def finish(process: subprocess.Popen, save: Path) -> str:
    code, output = process.wait(timeout=120), printed_by(save).read_text()
    assert code == 0, output[-3000:]
    return output


def wait_until(process: subprocess.Popen, save: Path, reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert process.poll() is None, printed_by(save).read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.01)


def kill(process: subprocess.Popen) -> None:
    """Kill a run and the processes that it started, as the loss of a machine does."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def saved_above(save: Path, iteration: int) -> Callable[[], bool]:
    tracker = save / TRACKER

    def reached() -> bool:
        text = tracker.read_text().strip() if tracker.exists() else ""
        return text.isdigit() and int(text) > iteration

    return reached


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory) -> dict[int, tuple[float, float]]:
    save = tmp_path_factory.mktemp("uninterrupted")
    finish(start(corpus, save), save)
    return steps(save)


def check_killed(corpus: Path, save: Path, whole: dict, kills: int, *options: object) -> None:
    """Kill a run again and again, and compare what it has made once it may finish."""
    print("moments", seed := random.randrange(1 << 30))
    draws, last = random.Random(seed), 0
    for _ in range(kills):
        process = start(corpus, save, *options)
        wait_until(process, save, saved_above(save, last))
        # An iteration and its save together take about a tenth of a second.
        time.sleep(draws.uniform(0.0, 0.15))
        kill(process)
        last = max(complete_iterations(save))
        assert last < LENGTH, "too late to be killed: let the run have more iterations"
    finish(start(corpus, save, *options), save)
    made = steps(save)
    # The last iterations before the loss of a machine may have been saved and not yet written down.
    assert made == {step: whole[step] for step in made}
    assert made.keys() >= set(range(last + 1, LENGTH + 1))


def test_killed_at_random_moments(corpus, tmp_path, uninterrupted):
    """Also while it saves: it goes on from a whole checkpoint, and nothing differs in the end."""
    check_killed(corpus, tmp_path, uninterrupted, 3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ASYNC], ids=["", "saved in the background"])
@pytest.mark.parametrize("part", range(5))
def test_killed_twenty_times(corpus, tmp_path, uninterrupted, options, part):
    check_killed(corpus, tmp_path, uninterrupted, 4, *options)


def test_told_to_stop(corpus, tmp_path, uninterrupted):
    """By Megatron-LM's signal handler: saved and ended with code 0, to go on from there."""
    process = start(corpus, tmp_path, "--exit-signal-handler")
    wait_until(process, tmp_path, saved_above(tmp_path, 1))
    process.send_signal(signal.SIGTERM)
    output = finish(process, tmp_path)
    stopped = max(complete_iterations(tmp_path))
    assert "exiting program after receiving SIGTERM" in output
    assert max(steps(tmp_path)) == stopped < LENGTH
    finish(start(corpus, tmp_path), tmp_path)
    assert steps(tmp_path) == uninterrupted
