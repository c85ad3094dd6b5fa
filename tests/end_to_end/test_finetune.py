"""--finetune: a checkpoint's model, and nothing else of it."""

import pytest
from tiny_run import losses, refused

RUN = ("--train-iters", 3)


@pytest.mark.parametrize("optimizer", [(), ("--use-distributed-optimizer",)])
def test_it_begins_with_the_model_at_iteration_0(optimizer, pretrain_here, tmp_path):
    """With a rate of 0 the model stays what it was: its loss on the data that trained it."""
    first, second = tmp_path / "first", tmp_path / "second"
    pretrain_here(*RUN, *optimizer, "--save", first)
    load = ("--load", first, "--finetune", "--lr", 0, "--global-batch-size", 2)
    result = pretrain_here("--train-iters", 6, *load, "--save", second)
    assert "at iteration 3; starting at 0" in result.stdout
    before, after = losses(first), losses(second)
    assert after.keys() == set(range(1, 7))
    # Batches half as large: two of them are one of the first run's.
    assert (after[1] + after[2]) / 2 < before[1] - 0.5
    resumed = pretrain_here("--train-iters", 6, *load, "--load", second, "--save", tmp_path / "c")
    assert losses(tmp_path / "c") == after, resumed.stderr


def test_it_needs_a_checkpoint(pretrain_here):
    assert "--finetune needs --load" in refused(pretrain_here(*RUN, "--finetune"))
