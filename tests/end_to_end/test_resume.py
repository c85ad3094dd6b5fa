"""Resumed runs repeat uninterrupted ones to the bit, with all training features.

Losses and gradient norms are compared as metrics.jsonl has them. Random states, the order of the
data, stochastic rounding and optimizers all have a part in them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import (
    FULL_RECOMPUTATION,
    HYBRID,
    LATENT,
    ONE_MICROBATCH,
    OTHER_RECIPE,
    done,
    start_from,
    steps,
)

from tests.marks import others_slow

NVFP4 = ("--fp4-recipe", "nvfp4")
# Saved after 2 steps, delayed after 3: more than the length, so that steps are counted through it.
DELAYED = ("--fp8-recipe", "fp8-delayed", "--recipe-set", "amax_history.just_in_time=3",
           "--recipe-set", "amax_history.length=1")  # fmt: skip
DROPOUT = (*NVFP4, "--hidden-dropout", 0.1, "--attention-dropout", 0.1)
SELECTIVE = ("--recompute-granularity", "selective")
ASYNC = ("--async-save", "--async-strategy", "mcore")
EXPERTS = ("--num-experts", 4, "--moe-ffn-hidden-size", 64, "--moe-layer-freq", "[0,1,0,1]",
           "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff",
           0.01)  # fmt: skip
MXNORM = ("--precision-recipe", "mxfp8", "--normalization", "MXNorm")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAPPED = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")

WAYS = {
    "nvfp4": NVFP4,  # of two microbatches
    "nvfp4 with dropout": (*DROPOUT, *ONE_MICROBATCH),
    "delayed scaling": (*DELAYED, *ONE_MICROBATCH),
    "delayed scaling, saved in the background": (*DELAYED, *ASYNC, *ONE_MICROBATCH),
    "full recomputation": (*DROPOUT, *FULL_RECOMPUTATION, *ONE_MICROBATCH),
    "selective recomputation": (*DROPOUT, *SELECTIVE, *ONE_MICROBATCH),
    "distributed optimizer": (*NVFP4, *DISTRIBUTED, *ONE_MICROBATCH),
    "hybrid": (*HYBRID, *NVFP4, *ONE_MICROBATCH),
    "experts": (*EXPERTS, *NVFP4, *ONE_MICROBATCH),
    "MXNorm": (*MXNORM, *ONE_MICROBATCH),
    "latent attention": (*LATENT, *NVFP4, *ONE_MICROBATCH),
    "two tokens ahead": (*NVFP4, *ONE_MICROBATCH, "--mtp-num-layers", 1),
}
# Only the loss of the second step after a checkpoint depends on the moments in it.
LENGTH = 4
SAVED = 2


@pytest.fixture
def train(memory, pretrain_here, tmp_path_factory) -> Callable[[str], Path]:
    """Function that makes a whole run once, with checkpoints in the middle and at the end."""

    def run(way: str) -> Path:
        if way not in memory:
            save = memory[way] = tmp_path_factory.mktemp("whole")
            done(pretrain_here(*WAYS[way], *whole(save)))
        return memory[way]

    return run


def whole(save: Path) -> tuple:
    return "--train-iters", LENGTH, "--save-interval", SAVED, "--save", save


def rest(source: Path, save: Path) -> tuple:
    """Return arguments of a run that resumes from the middle of another."""
    start_from(source, SAVED, save)
    return "--train-iters", LENGTH, "--load", save, "--save", save


def check(resumed: Path, source: Path) -> None:
    found, expected = steps(resumed), steps(source)
    assert expected.keys() == set(range(1, LENGTH + 1))
    assert found == {step: expected[step] for step in expected if step > SAVED}


# The first is like the second. Two ranks below save and load the states of a distributed optimizer,
# test_delayed those of delayed scaling; the others add none.
QUICK = ("nvfp4 with dropout", "delayed scaling, saved in the background", "experts")


@pytest.mark.parametrize("way", others_slow(WAYS, QUICK))
def test_one_process(train, pretrain_here, tmp_path, way):
    done(pretrain_here(*WAYS[way], *rest(train(way), tmp_path / "rest")))
    check(tmp_path / "rest", train(way))


@pytest.mark.slow
def test_another_process(train, pretrain_command, tmp_path):
    """The result does not depend on the state of a process."""
    way = "nvfp4 with dropout"
    script = Path(__file__).with_name("run_script.py")
    done(pretrain_command(*WAYS[way], *rest(train(way), tmp_path / "rest"), script=script))
    check(tmp_path / "rest", train(way))


OTHER_SEED = ("--seed", 4321, "--resume-changed", "data")


def test_without_the_checkpoints_states_nothing_is_repeated(train, pretrain_here, tmp_path):
    """Other random numbers, or no amax histories, change the steps."""
    for way, other in (
        ("nvfp4 with dropout", (*WAYS["nvfp4 with dropout"], *OTHER_SEED)),
        ("delayed scaling", ("--fp8-recipe", "fp8-tensorwise", *OTHER_RECIPE, *ONE_MICROBATCH)),
    ):
        done(pretrain_here(*other, *rest(train(way), tmp_path / way)))
        with pytest.raises(AssertionError):
            check(tmp_path / way, train(way))


@pytest.mark.parametrize("way", ["full recomputation", "selective recomputation"])
def test_recomputation_replays_rounding_and_dropout(train, way):
    """Losses and gradients equal a run without recomputation."""
    assert steps(train(way)) == steps(train("nvfp4 with dropout"))


def test_saving_in_the_background_changes_nothing(train):
    one, other = train("delayed scaling"), train("delayed scaling, saved in the background")
    assert steps(one) == steps(other)
    for iteration in (SAVED, LENGTH):
        assert (other / f"iter_{iteration:07d}" / "lowbit.json").is_file()


RANKS = {
    "data parallel": (*NVFP4, *OVERLAPPED),
    "data parallel, delayed scaling": (*DELAYED, *DISTRIBUTED),
    "data parallel, saved in the background": (*NVFP4, *OVERLAPPED, *ASYNC),
    "tensor and sequence parallel with dropout": (
        *DROPOUT, "--tensor-model-parallel-size", 2, "--sequence-parallel",
    ),
    "expert parallel": (*EXPERTS, *NVFP4, "--expert-model-parallel-size", 2),
    "pipeline parallel hybrid": (*HYBRID, *NVFP4, "--pipeline-model-parallel-size", 2),
}  # fmt: skip


@pytest.mark.slow
def test_two_ranks(pretrain_ranks, tmp_path):
    """One job makes all whole runs before their folders are copied."""
    pretrain_ranks({way: (*RANKS[way], *whole(tmp_path / way)) for way in RANKS})
    (tmp_path / "ranks").rename(tmp_path / "whole")
    pretrain_ranks(
        {way: (*RANKS[way], *rest(tmp_path / way, tmp_path / f"{way}, rest")) for way in RANKS}
    )
    for way in RANKS:
        check(tmp_path / f"{way}, rest", tmp_path / way)
