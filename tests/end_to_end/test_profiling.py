"""--profile: torch's profile of the iterations asked for, and the same training."""

import gzip
import json

import pytest
from tiny_run import done, refused

TRAIN = ("--fp4-recipe", "nvfp4", "--train-iters", 5)
STEPS = ("--profile-step-start", 2, "--profile-step-end", 4)
ASKED = ("--profile", "--use-pytorch-profiler", *STEPS)


def test_a_trace_and_a_table_of_the_iterations_asked_for(pretrain_here, tmp_path):
    results = [
        done_result(pretrain_here(*TRAIN, *more))
        for more in ((), (*ASKED, "--tensorboard-dir", tmp_path))
    ]
    assert results[0] == results[1] and "validation loss" in results[0]
    files = sorted(file.name for file in tmp_path.iterdir() if "profile" in file.name)
    assert files == ["profile_rank_00000.json.gz", "profile_rank_00000.txt"]
    with gzip.open(tmp_path / files[0]) as trace:
        events = json.load(trace)["traceEvents"]
    # The optimizer steps once an iteration.
    steps = [event for event in events if event.get("name", "").startswith("Optimizer.step")]
    assert len(steps) == 2
    assert "aten::" in (tmp_path / files[1]).read_text()


def test_a_run_that_goes_on_after_them_says_so(pretrain_here, tmp_path):
    save = ("--save", tmp_path / "run")
    done(pretrain_here(*TRAIN, "--train-iters", 3, *save))
    profiled = (*ASKED, "--tensorboard-dir", tmp_path / "board")
    result = pretrain_here(*TRAIN, *save, "--load", tmp_path / "run", *profiled)
    done(result)
    assert "nothing is profiled: the run goes on after 3 iterations" in result.stdout
    assert not list((tmp_path / "board").glob("profile*"))


def done_result(result) -> str:
    """A run's last word, its validation loss."""
    done(result)
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--use-pytorch-profiler",), "needs --profile"),
        (ASKED, "--use-pytorch-profiler needs --tensorboard-dir"),
        ((*ASKED, "--profile-step-end", 2), "--profile-step-end 2 must exceed"),
        ((*ASKED, "--profile-step-end", 6), "--profile-step-end 6 exceeds --train-iters 5"),
        ((*ASKED, "--profile-step-start", 0), "--profile-step-start 0: must be positive"),
        (("--profile", *STEPS), "marks work on a GPU, and there is none"),
    ],
)
def test_what_does_not_go_together(pretrain_here, arguments, named):
    assert named in refused(pretrain_here(*TRAIN, *arguments))
