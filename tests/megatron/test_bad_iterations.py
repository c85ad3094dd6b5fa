"""--skip-bad-iterations: recorded iterations, skipped iterations, and the end of a run."""

import json
import multiprocessing
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.megatron.run.bad_iterations import NOTES, read_notes, skip_bad_iterations

NOT_FINITE = RuntimeError("Rank 0: Unexpected result nan on iteration #7")


class Started(BaseException):
    """Exception in place of a restarted process."""


@pytest.fixture
def started(monkeypatch) -> list:
    """Commands with which this process would have been replaced."""
    commands = []

    def become(program: str, command: list[str]) -> None:
        commands.append((program, command))
        raise Started

    monkeypatch.setattr(os, "execv", become)
    # Those of other tests in this process, such as Megatron-LM's queue of checkpoints, go on.
    monkeypatch.setattr(multiprocessing, "active_children", list)
    return commands


def arguments(folder: Path, **changes: object) -> Namespace:
    values = {
        "skip_bad_iterations": 2, "save": str(folder), "load": str(folder),
        "iterations_to_skip": [], "check_for_nan_in_loss_and_grad": True,
        "rerun_mode": "disabled", "rank": 0, "world_size": 1, "curr_iteration": 6,
    }  # fmt: skip
    return Namespace(**{**values, **changes})


def note(folder: Path, *iterations: int) -> None:
    (folder / NOTES).write_text(json.dumps(iterations))


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skip_bad_iterations": 0}, "--skip-bad-iterations 0: must be positive"),
        ({"save": None}, "needs --save and --load with the same folder"),
        ({"load": "elsewhere"}, "needs --save and --load with the same folder"),
        ({"check_for_nan_in_loss_and_grad": False}, "needs loss and gradients checked"),
        ({"rerun_mode": "validate_results"}, "needs --rerun-mode disabled"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, changes, message):
    refused = pytest.raises(UserError, match=message)
    with refused, skip_bad_iterations(arguments(tmp_path, **changes)):
        raise AssertionError("the run must not begin")


def test_without_the_argument_nothing_is_read_or_caught(tmp_path):
    (tmp_path / NOTES).write_text("damaged")
    args = arguments(tmp_path, skip_bad_iterations=None, save=None)
    with pytest.raises(RuntimeError) as caught, skip_bad_iterations(args):
        raise NOT_FINITE
    assert caught.value is NOT_FINITE and args.iterations_to_skip == []


# -- notes -----------------------------------------------------------------------------------------


def test_noted_iterations_are_skipped_with_those_of_the_user(tmp_path, capsys):
    note(tmp_path, 9, 4)
    args = arguments(tmp_path, iterations_to_skip=[12, 4])
    with skip_bad_iterations(args):
        assert args.iterations_to_skip == [4, 9, 12]
    assert capsys.readouterr().out == f"{tmp_path / NOTES}: skipping iterations 9, 4\n"
    with skip_bad_iterations(arguments(tmp_path, rank=1)):
        pass
    assert capsys.readouterr().out == ""


def test_a_run_that_ends_well_notes_nothing(tmp_path, capsys):
    with skip_bad_iterations(arguments(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
    assert read_notes(tmp_path / NOTES) == []


DAMAGED = ["", "{", "[" * 10**5, "7", "{}", "[0]", "[1.5]", '["1"]', "[true]"]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_notes(tmp_path, content):
    (tmp_path / NOTES).write_text(content)
    with pytest.raises(UserError, match="not a JSON list of iterations; correct or delete it"):
        read_notes(tmp_path / NOTES)
    with pytest.raises(UserError), skip_bad_iterations(arguments(tmp_path)):
        raise AssertionError("the run must not begin")


# -- a bad iteration -------------------------------------------------------------------------------


def test_one_process_notes_it_and_starts_itself_again(tmp_path, started, capsys):
    note(tmp_path, 3)
    with pytest.raises(Started), skip_bad_iterations(arguments(tmp_path)):
        raise NOT_FINITE
    # Iterations are counted from 1; the sixth was done.
    assert read_notes(tmp_path / NOTES) == [3, 7]
    assert started == [(sys.executable, sys.orig_argv)]
    said = "iteration 7: loss or gradients are not finite: restarting from the last checkpoint"
    assert said in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [NOTES]


def test_several_ranks_note_it_and_end(tmp_path, started):
    """The launcher has to restart all ranks."""
    args = arguments(tmp_path, world_size=2, rank=1)
    message = "iteration 7: loss or gradients are not finite: recorded; a restarted run skips"
    with pytest.raises(TrainingError, match=message), skip_bad_iterations(args):
        raise NOT_FINITE
    assert read_notes(tmp_path / NOTES) == [7] and started == []


def test_it_gives_up_after_as_many_as_allowed(tmp_path, started):
    note(tmp_path, 3, 5)
    with (
        pytest.raises(
            TrainingError, match=r"iteration 7: .*, after 2 skipped iterations"
        ) as caught,
        skip_bad_iterations(arguments(tmp_path)),
    ):
        raise NOT_FINITE
    assert caught.value.__cause__ is NOT_FINITE
    assert read_notes(tmp_path / NOTES) == [3, 5] and started == []


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("Unexpected result")])
def test_other_errors_pass(tmp_path, started, error):
    with pytest.raises(type(error)) as caught, skip_bad_iterations(arguments(tmp_path)):
        raise error
    assert caught.value is error
    assert list(tmp_path.iterdir()) == [] and started == []


def test_megatron_lm_still_says_what_is_looked_for(tmp_path, started):
    """The error of its state machine in disabled rerun mode has the expected text."""
    from megatron_lowbit.megatron.pretrain import teardown

    # isort: split
    from megatron.core.rerun_state_machine import (
        RerunMode,
        get_rerun_state_machine,
        initialize_rerun_state_machine,
    )

    with teardown():
        initialize_rerun_state_machine(mode=RerunMode.DISABLED)
        with pytest.raises(Started), skip_bad_iterations(arguments(tmp_path)):
            get_rerun_state_machine().validate_result(
                result=float("nan"), rejection_func=lambda value: True, message="found NaN",
                tolerance=0.0, fatal=True,
            )  # fmt: skip
    assert read_notes(tmp_path / NOTES) == [7]
