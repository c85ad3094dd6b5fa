"""Runs with a gradient that is not finite: the end, or a restart without its data."""

import json
from pathlib import Path

import pytest
from tiny_run import done, steps

FAULTY = Path(__file__).with_name("faulty_run.py")
RUN = ("--fp4-recipe", "nvfp4", "--train-iters", 5, "--save-interval", 1)


def test_megatron_lm_ends_the_run(pretrain_forked, tmp_path):
    """The error has its place. Earlier checkpoints stay, and no invalid one is saved.

    Processes that load data do not hold it up, though they ignore signals.
    """
    save = ("--save", tmp_path, "--load", tmp_path)
    more = ("--exit-signal-handler", "--num-workers", 1)
    result = pretrain_forked(*RUN, *save, *more, script=FAULTY)
    assert result.returncode == 1
    assert "Unexpected result nan" in result.stderr and "iteration" in result.stderr
    assert steps(tmp_path).keys() == {1, 2, 3}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


@pytest.mark.slow
def test_it_goes_back_and_skips_the_data(pretrain_command, pretrain_here, tmp_path):
    """The result equals that of a run with --iterations-to-skip from its start.

    The process is replaced by one with its own command.
    """
    faulty = tmp_path / "faulty"
    more = ("--save", faulty, "--load", faulty, "--skip-bad-iterations", 2)
    result = pretrain_command(*RUN, *more, script=FAULTY)
    done(result)
    assert "iteration 4: loss or gradients are not finite: restarting" in result.stdout
    assert json.loads((faulty / "bad_iterations.json").read_text()) == [4]
    done(pretrain_here(*RUN, "--iterations-to-skip", 4, "--save", tmp_path / "told"))
    told = steps(tmp_path / "told")
    assert told.keys() == {1, 2, 3, 5}
    assert steps(faulty) == told
