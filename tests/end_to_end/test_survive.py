"""What a run survives: being told to stop, being killed, and numbers that are not finite."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_run import ENVIRONMENT, ROOT, arguments_for, start_from

from megatron_lowbit.errors import TrainingError
from megatron_lowbit.training import run
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.checkpoint import TRACKER
from megatron_lowbit.training.pretrain import pretrain

NVFP4 = ("--fp4-recipe", "nvfp4", "--save-interval", "1")
BATCH = 4


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by iteration; each iteration stands there once."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [e for e in entries if "lm_loss" in e]
    made = {e["iteration"]: (e["lm_loss"], e["grad_norm"]) for e in logged}
    assert len(made) == len(logged)
    return made


def start(corpus: Path, save: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py")]
    given = (*NVFP4, "--save", str(save), "--load", str(save), *arguments)
    return subprocess.Popen(
        [*command, *arguments_for(corpus, given)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_checkpoint(process: subprocess.Popen, save: Path, above: int = 0) -> None:
    tracker = save / TRACKER
    while not tracker.exists() or int(tracker.read_text()) <= above:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory) -> dict[int, tuple[float, float]]:
    save = tmp_path_factory.mktemp("uninterrupted")
    process = start(corpus, save, "--train-iters", "16")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return losses(save)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_told_to_stop(corpus, tmp_path, number):
    """The iteration is finished and saved, exit code 0; the next run goes on from there.

    The first time nothing was logged yet.
    """
    last = 0
    for options in (("--log-interval", "1000"), ("--async-save",)):
        process = start(corpus, tmp_path, "--train-iters", "100000", *options)
        wait_for_checkpoint(process, tmp_path, above=last)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert f"at iteration {last}" in output or last == 0
        last = int((tmp_path / TRACKER).read_text())
        assert f"stopped by {signal.Signals(number).name} after iteration {last}" in output
    assert max(losses(tmp_path)) == last


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--async-save",)])
def test_killed_at_random_moments(corpus, tmp_path, uninterrupted, options):
    """Also while it saves: the newest complete checkpoint loads, and nothing differs in the end."""
    moments = [random.uniform(0.0, 0.4) for _ in range(2)]  # others each time
    print("killed after", moments)
    saved = 0
    for moment in moments:
        process = start(corpus, tmp_path, "--train-iters", "16", *options)
        wait_for_checkpoint(process, tmp_path, above=saved)
        time.sleep(moment)
        process.kill()
        process.communicate()
        saved = int((tmp_path / TRACKER).read_text())
        assert saved < 16, "too late to be killed: let the run have more iterations"
    process = start(corpus, tmp_path, "--train-iters", "16")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    made = losses(tmp_path)
    assert made == {i: uninterrupted[i] for i in made} and max(made) == 16
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".iter")]


def faulty(corpus, save, at, *arguments):
    """A run whose backward passes of these numbers (from 1, of all that it makes) give NaN."""
    made = []

    def spoil(iteration, model):
        made.append(iteration)
        if len(made) in at:
            model[0].buffers[0].grad_data[7] = torch.nan

    given = ("--save", str(save), "--log-interval", "1", *arguments)
    pretrain(parse_arguments(arguments_for(corpus, given)), after_backward=spoil)
    return made


def test_one_bad_gradient_is_skipped(corpus, tmp_path, capsys):
    assert faulty(corpus, tmp_path, {3}, "--train-iters", "6") == list(range(6))
    output = capsys.readouterr().out
    assert re.search(r"iteration 3: update skipped.*samples 8 to 11", output)
    made = losses(tmp_path)
    assert made.keys() == {1, 2, 4, 5, 6}
    assert all(torch.tensor(made[i]).isfinite().all() for i in made)


def test_bad_steps_in_a_row_go_back_and_leave_out_their_data(corpus, tmp_path, capsys, monkeypatch):
    """From iteration 2 on the run is that of a checkpoint told to begin behind the bad samples."""
    save = tmp_path / "faulty"
    options = ("--train-iters", "5", "--save-interval", "2", "--max-skipped-updates", "2")
    made = faulty(corpus, save, {3, 4}, *options)
    assert made == [0, 1, 2, 3, 2, 3, 4]
    output = capsys.readouterr().out
    assert "2 updates in a row skipped: back to iteration 2" in output
    assert "leaving out samples 8 to 15" in output
    reference = start_from(save, 2, tmp_path / "reference")

    def behind_the_bad_samples(*arguments):
        loaded = load_checkpoint(*arguments)
        assert loaded["state"]["consumed_samples"] == 2 * BATCH
        loaded["state"]["consumed_samples"] = 4 * BATCH
        return loaded

    load_checkpoint = run.load_checkpoint
    monkeypatch.setattr(run, "load_checkpoint", behind_the_bad_samples)
    faulty(corpus, reference, (), "--train-iters", "5", "--load", str(reference))
    assert {i: losses(save)[i] for i in (3, 4, 5)} == losses(reference)


def test_left_out_data_stays_left_out_after_a_resume(corpus, tmp_path):
    """The checkpoint of iteration 3 is made before the bad samples are passed again."""
    options = ("--save-interval", "1", "--max-skipped-updates", "1")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    faulty(corpus, whole, {4}, "--train-iters", "6", *options)
    start_from(whole, 3, resumed)
    faulty(corpus, resumed, (), "--train-iters", "6", "--load", str(resumed), *options)
    made = losses(resumed)
    assert made.keys() == {4, 5, 6}
    spoiled_again = {i: losses(whole)[i] for i in made}
    assert made != spoiled_again  # that checkpoint does not know yet; the next one does
    start_from(whole, 4, tmp_path / "later")
    faulty(corpus, tmp_path / "later", (), "--train-iters", "6", "--load", str(tmp_path / "later"))
    assert losses(tmp_path / "later") == {i: losses(whole)[i] for i in (5, 6)}


def test_nowhere_to_go_back_to(corpus, tmp_path):
    with pytest.raises(TrainingError, match=r"iteration 3: 3 updates in a row .*--save-interval"):
        faulty(corpus, tmp_path, {1, 2, 3}, "--train-iters", "6")


def test_other_data_does_not_help(corpus, tmp_path):
    options = ("--train-iters", "9", "--save-interval", "2")
    with pytest.raises(TrainingError, match="right after going back"):
        faulty(corpus, tmp_path, set(range(3, 99)), *options)


def test_a_layer_whose_output_is_not_finite_is_named(corpus, tmp_path, capsys):
    """A weight made infinite after the first step: layer 3's output, and those behind it."""

    def spoil(iteration, model):
        if iteration == 0:
            weight = model[0].module.decoder.layers[2].mlp.linear_fc2.weight
            model[0].buffers[0].grad_data.zero_()
            weight.data.fill_(torch.inf)

    given = ("--train-iters", "2", "--check-output-norm-interval", "1")
    given += ("--max-skipped-updates", "1")
    with pytest.raises(TrainingError):
        pretrain(parse_arguments(arguments_for(corpus, given)), after_backward=spoil)
    assert "iteration 2: output of layer 3, 4 is not finite" in capsys.readouterr().out
