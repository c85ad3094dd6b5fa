"""Delayed scaling in a run: amax histories across resumption, layouts and evaluation."""

from itertools import pairwise

import pytest
import torch
from tiny_run import (
    FULL_RECOMPUTATION,
    ONE_MICROBATCH,
    OTHER_RECIPE,
    done,
    losses,
    recorded_histories,
    refused,
    saved_histories,
    start_from,
    steps,
)

FP8 = ("--fp8-recipe", "fp8-delayed", "--recipe-set", "amax_history.just_in_time=2",
       "--recipe-set", "amax_history.length=4")  # fmt: skip
TENSORWISE = ("--fp8-recipe", "fp8-tensorwise")
FC1 = "decoder.layers.1.mlp.linear_fc1"
# Rows of a history: fprop's input and weight, dgrad's grad and weight, wgrad's grad and input.
FORWARD, GRADIENTS = [0, 1, 5], [2, 4]


def equal(one: dict, other: dict) -> bool:
    """Return True if two sets of histories are the same to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[path], other[path]) for path in one)


@pytest.fixture
def whole(memory, pretrain_here, tmp_path_factory):
    """Pair (folder, histories by iteration) of a run of six iterations that saves each."""
    if not memory:
        folder = tmp_path_factory.mktemp("delayed") / "whole"
        with recorded_histories() as recorded:
            done(pretrain_here(*FP8, "--train-iters", 6, "--save", folder, "--save-interval", 1))
        memory["whole"] = folder, recorded | {6: saved_histories(folder / "iter_0000006")}
    return memory["whole"]


@pytest.fixture
def train(pretrain_here, tmp_path):
    """Function that runs NAME with delayed scaling and returns (steps, histories by iteration)."""

    def run(name: str, *arguments, recipe=FP8) -> tuple[dict, dict]:
        save = tmp_path / name
        with recorded_histories() as recorded:
            done(pretrain_here(*recipe, *arguments, "--save", save))
        last = max(recorded) + 1
        return steps(save), recorded | {last: saved_histories(save / f"iter_{last:07d}")}

    return run


def test_a_step_appends_its_amaxes(whole, train):
    """Amaxes enter on the right. GEMMs share the amaxes of gradient and input."""
    histories = [whole[1][iteration][FC1] for iteration in range(7)]
    assert (histories[0] == -1).all()
    for old, new in pairwise(histories):
        assert torch.equal(new[:, :-1], old[:, 1:])
    newest = torch.stack([entries[:, -1] for entries in histories[1:]])
    assert (newest[:, FORWARD + GRADIENTS] > 0).all()
    assert len(newest[:, 0].unique()) == len(newest[:, 1].unique()) == 6
    # fprop's quantized weight serves dgrad, which has none of its own.
    assert (newest[:, 3] == -1).all()
    assert torch.equal(newest[:, 0], newest[:, 5]) and torch.equal(newest[:, 2], newest[:, 4])


def test_scales_come_from_the_history_once_it_is_long_enough(whole, train):
    """The first two steps use each tensor's own amax, like tensorwise scaling."""
    tensorwise, _ = train("tensorwise", "--train-iters", 3, recipe=TENSORWISE)
    delayed = steps(whole[0])
    assert [delayed[step] == tensorwise[step] for step in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize(("iteration", "launcher"), [(2, "pretrain_forked"), (4, "pretrain_here")])
def test_resumes_to_the_bit(whole, request, tmp_path, iteration, launcher):
    """The resumed run is in another process, or in this one."""
    pretrain, (folder, recorded) = request.getfixturevalue(launcher), whole
    saved = saved_histories(folder / f"iter_{iteration:07d}")
    assert len(saved) == 16
    assert equal(saved, recorded[iteration])
    save = start_from(folder, iteration, tmp_path / "resumed")
    done(pretrain(*FP8, "--train-iters", 6, "--load", save, "--save", save))
    assert steps(save) == {k: v for k, v in steps(folder).items() if k > iteration}
    assert equal(saved_histories(save / "iter_0000006"), recorded[6])


def test_a_run_without_histories_leaves_those_of_a_checkpoint(whole, pretrain_here, tmp_path):
    """The run resumes with other steps, so that the test of resumption can fail."""
    save = start_from(whole[0], 2, tmp_path / "tensorwise")
    resumed = ("--train-iters", 3, "--load", save, "--save", save)
    done(pretrain_here(*TENSORWISE, *resumed, *OTHER_RECIPE))
    assert steps(save)[3] != steps(whole[0])[3]


def test_a_checkpoint_without_histories_starts_just_in_time(pretrain_here, train, tmp_path):
    train("plain", "--train-iters", 2, *ONE_MICROBATCH, recipe=("--precision-recipe", "bf16"))
    assert saved_histories(tmp_path / "plain" / "iter_0000002") == {}
    for name in ("delayed", "tensorwise"):
        start_from(tmp_path / "plain", 2, tmp_path / name)
    goes_on = (*ONE_MICROBATCH, *OTHER_RECIPE, "--train-iters", 5, "--load")
    delayed, recorded = train("delayed", *goes_on, tmp_path / "delayed")
    tensorwise, _ = train("tensorwise", *goes_on, tmp_path / "tensorwise", recipe=TENSORWISE)
    assert (recorded[2][FC1] == -1).all()
    assert [delayed[step] == tensorwise[step] for step in (3, 4, 5)] == [True, True, False]


@pytest.mark.parametrize(
    ("changes", "kept"), [((), 16), (("length=2",), 2), (("length=4", "just_in_time=9"), 9)]
)
def test_a_history_of_another_length_is_refused_and_the_fix_named(
    whole, pretrain_here, tmp_path, changes, kept
):
    save = start_from(whole[0], 2, tmp_path / "longer")
    command = ["--fp8-recipe", "fp8-delayed", "--train-iters", 3, "--load", save, "--save", save,
               *OTHER_RECIPE]  # fmt: skip
    for change in changes:
        command += ["--recipe-set", f"amax_history.{change}"]
    error = refused(pretrain_here(*command))
    assert f"has 4 steps, but this run's recipe keeps {kept}; the larger of " in error
    assert "amax_history.length and amax_history.just_in_time must be 4" in error
    assert sorted(path.name for path in save.glob("*")) == [
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.mark.slow
def test_what_the_kept_steps_suffice_for_may_change(whole, train, tmp_path):
    """Steps 3 and 4 also scale just in time after the change, by each tensor's own amax."""
    for name in ("longer", "tensorwise"):
        start_from(whole[0], 2, tmp_path / name)
    goes_on = (*OTHER_RECIPE, "--train-iters", 5, "--load")
    longer = (*FP8, "--recipe-set", "amax_history.just_in_time=4")
    delayed, _ = train("longer", *goes_on, tmp_path / "longer", recipe=longer)
    tensorwise, _ = train("tensorwise", *goes_on, tmp_path / "tensorwise", recipe=TENSORWISE)
    assert [delayed[step] == tensorwise[step] for step in (3, 4, 5)] == [True, True, False]
    assert delayed[3] != steps(whole[0])[3]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--eval-interval", 1, "--eval-iters", 2), id="evaluation"),
        pytest.param(FULL_RECOMPUTATION, id="full recomputation", marks=pytest.mark.slow),
    ],
)
def test_leaves_losses_and_histories_as_they_are(whole, train, arguments):
    """Neither evaluation nor recomputation adds amaxes."""
    actual, recorded = train("again", "--train-iters", 3, *arguments)
    assert actual == {k: v for k, v in steps(whole[0]).items() if k <= 3}
    assert all(equal(recorded[iteration], whole[1][iteration]) for iteration in range(4))


def test_a_step_is_an_optimizer_step_not_a_microbatch(whole, train):
    """Four microbatches record the same maximum in one entry as two of twice the size."""
    _, split = train("split", "--train-iters", 1, "--micro-batch-size", 1)
    for path, entries in whole[1][1].items():
        assert torch.equal(split[1][path] >= 0, entries >= 0)
        # Quantized with scales of smaller tensors, values differ by as much as E4M3 is coarse.
        newest = (split[1][path][FORWARD, -1], entries[FORWARD, -1])
        assert torch.allclose(*newest, rtol=1 / 8)
    assert torch.equal(split[1][FC1][1], whole[1][1][FC1][1])


LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", 2),
    "sp": ("--tensor-model-parallel-size", 2, "--sequence-parallel"),
    "pp2": ("--pipeline-model-parallel-size", 2),
    "pp2 interleaved": ("--pipeline-model-parallel-size", 2,
                        "--num-layers-per-virtual-pipeline-stage", 1),
    "dp2": (),
    "dp2 distributed optimizer": ("--use-distributed-optimizer",),
}  # fmt: skip


# Where a layout goes on from the one process's run: here before scales come from histories, which
# are of gradients half as large.
BEGIN = {"dp2": 1}
# The two stages of a pipeline, of which the second keeps shorter histories.
UNEQUAL = """
name: unequal
configs:
  long: &long
    input: &tensor {format: fp8-tensor-e4m3}
    weight: *tensor
    grad: *tensor
    amax_history: {length: 4, just_in_time: 2}
  short: {<<: *long, amax_history: {length: 2, just_in_time: 2}}
matchers:
  ends: {type: blocks, last: 2, config: short, enabled: true}
  rest: {type: glob, pattern: "*", config: long, enabled: true}
"""


@pytest.mark.slow
def test_two_ranks_load_and_keep_the_histories_of_one(
    whole, pretrain_here, pretrain_ranks, train, tmp_path
):
    """Each layout resumes from one process's checkpoint, with equal histories on both ranks.

    They stay equal to that process's, too. Gradients of two data-parallel ranks are twice as
    large, for each rank divides its loss by one microbatch instead of two. Only tensor parallelism
    adds up in another order; amaxes of the other layouts are the same to the bit.
    """
    single, histories = whole
    runs = {}
    for name, arguments in LAYOUTS.items():
        save = tmp_path / name
        if "distributed" in name:
            arguments = (*arguments, "--train-iters", 2)
        else:
            begin = BEGIN.get(name, 2)
            start_from(single, begin, save)
            arguments = (*arguments, "--train-iters", begin + 2, "--load", save)
        runs[name] = (*FP8, *arguments, "--save", save, "--save-interval", 1)
    (tmp_path / "unequal.yaml").write_text(UNEQUAL)
    load = start_from(single, 2, tmp_path / "unequal")
    runs["unequal"] = ("--precision-recipe", tmp_path / "unequal.yaml", "--train-iters", 4,
                       "--load", load, "--pipeline-model-parallel-size", 2,
                       *OTHER_RECIPE)  # fmt: skip
    # Found by one rank, told by both: neither waits for the other.
    ranks = pretrain_ranks(runs, refused=("unequal",))
    for rank in range(2):
        assert "layers.2." in (ranks / f"unequal.{rank}.error").read_text()
    for name in LAYOUTS:
        first, second = (torch.load(ranks / f"{name}.{rank}.pt") for rank in range(2))
        last = max(first)
        if "pp2" in name:
            assert not first[last].keys() & second[last].keys()
            first = {step: first[step] | second[step] for step in first}
        else:
            assert all(equal(first[step], second[step]) for step in first), name
        assert equal(saved_histories(tmp_path / name / f"iter_{last:07d}"), first[last]), name
        if "distributed" not in name:
            assert equal(first[last - 1], histories[last - 1]), name
            found, expected = losses(tmp_path / name), losses(single)
            assert found[last] == pytest.approx(expected[last], rel=1e-5), name
            # Gradients that are added up in another order move a few values over a threshold.
            assert found[last + 1] == pytest.approx(expected[last + 1], rel=1e-3), name
        scale = 2 if "dp2" in name else 1
        for path, entries in histories[last].items():
            new, expected = first[last][path][:, -1], entries[:, -1].clone()
            expected[GRADIENTS] *= scale
            where = (name, path, new, expected)
            if name not in ("tp2", "sp"):
                assert torch.equal(new, expected), where
                continue
            assert torch.allclose(new[FORWARD], expected[FORWARD], rtol=1e-2), where
            # Each layer's sums move more gradients over a threshold of E5M2, 2**-2 apart: the
            # difference grows from 1e-7 in the last layer to 1.6e-2 in the first.
            assert torch.allclose(new[GRADIENTS], expected[GRADIENTS], rtol=5e-2), where

    back = start_from(tmp_path / "tp2", 3, tmp_path / "back")
    _, recorded = train("back", "--train-iters", 4, "--load", back)
    assert equal(recorded[3], torch.load(ranks / "tp2.0.pt")[3])
