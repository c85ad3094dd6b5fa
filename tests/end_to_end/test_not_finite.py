"""Runs with a gradient that is not finite: the end, or a restart without its data.

The file is its own worker, a run with such a gradient in the fourth iteration.
"""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tiny_run import done, steps

from megatron_lowbit.errors import exit_on_user_error
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.run.steps import steps_of
from tests.short_runs import hooked_runs, without_pictures

FAULTY = 4
RUN = ("--fp4-recipe", "nvfp4", "--train-iters", 5, "--save-interval", 1)


@pytest.mark.slow
def test_megatron_lm_ends_the_run(pretrain_forked, tmp_path):
    """The error has its place. Earlier checkpoints stay, and no invalid one is saved.

    Processes that load data do not hold it up, though they ignore signals.
    """
    save = ("--save", tmp_path, "--load", tmp_path)
    more = ("--exit-signal-handler", "--num-workers", 1)
    result = pretrain_forked(*RUN, *save, *more, script=Path(__file__))
    assert result.returncode == 1
    assert "Unexpected result nan" in result.stderr and "iteration" in result.stderr
    assert steps(tmp_path).keys() == {1, 2, 3}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


@pytest.mark.slow
def test_it_goes_back_and_skips_the_data(pretrain_command, pretrain_here, tmp_path):
    """The result equals a run's with --iterations-to-skip from its start.

    The process is replaced by one with its own command.
    """
    faulty = tmp_path / "faulty"
    more = ("--save", faulty, "--load", faulty, "--skip-bad-iterations", 2)
    result = pretrain_command(*RUN, *more, script=Path(__file__))
    done(result)
    assert "iteration 4: loss or gradients are not finite: restarting" in result.stdout
    assert json.loads((faulty / "bad_iterations.json").read_text()) == [FAULTY]
    done(pretrain_here(*RUN, "--iterations-to-skip", FAULTY, "--save", tmp_path / "told"))
    told = steps(tmp_path / "told")
    assert told.keys() == {1, 2, 3, 5}
    assert steps(faulty) == told


def spoil(chunks: list[torch.nn.Module], args: Namespace) -> None:
    """Set a gradient to NaN in an iteration."""
    now = []
    steps_of(args, chunks).listeners.append(lambda iteration, _: now.append(iteration + 1))
    # Hooks see no gradient of a linear layer, which goes to the main gradient by itself.
    weight = chunks[0].decoder.final_layernorm.weight
    weight.register_hook(lambda grad: grad * torch.nan if now[-1] == FAULTY else None)


def worker() -> None:
    with without_pictures(), hooked_runs(spoil):
        pretrain.main(hybrid=False)


if __name__ == "__main__":
    exit_on_user_error(worker)
