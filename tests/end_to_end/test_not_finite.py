"""Runs with a gradient that is not finite: the end, or a restart without its data."""

import json
import sys
from pathlib import Path

from tiny_run import arguments_for, done, launch, steps

FAULTY = Path(__file__).with_name("faulty_run.py")
RUN = ("--fp4-recipe", "nvfp4", "--train-iters", 5, "--save-interval", 1)


def train(corpus: Path, save: Path, *more: object):
    """Run with a NaN in the fourth iteration."""
    given = arguments_for(corpus, (*RUN, "--save", save, "--load", save, *more))
    return launch([sys.executable, str(FAULTY), "4", *given])


def test_megatron_lm_ends_the_run(corpus, tmp_path):
    """The error has its place. Earlier checkpoints stay, and no invalid one is saved.

    Processes that load data do not hold it up, though they ignore signals.
    """
    result = train(corpus, tmp_path, "--exit-signal-handler", "--num-workers", 1)
    assert result.returncode == 1
    assert "Unexpected result nan" in result.stderr and "iteration" in result.stderr
    assert steps(tmp_path).keys() == {1, 2, 3}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


def test_it_goes_back_and_skips_the_data(corpus, pretrain_here, tmp_path):
    """The result equals that of a run with --iterations-to-skip from its start."""
    result = train(corpus, tmp_path / "faulty", "--skip-bad-iterations", 2)
    done(result)
    assert "iteration 4: loss or gradients are not finite: restarting" in result.stdout
    assert json.loads((tmp_path / "faulty" / "bad_iterations.json").read_text()) == [4]
    done(pretrain_here(*RUN, "--iterations-to-skip", 4, "--save", tmp_path / "told"))
    told = steps(tmp_path / "told")
    assert told.keys() == {1, 2, 3, 5}
    assert steps(tmp_path / "faulty") == told
