"""Training towards a teacher: its loss, the parallel layouts, the checkpoint, and refusals."""

from pathlib import Path

import pytest
from tiny_run import HYBRID, ONE_MICROBATCH, check_same_tensors, done, losses, metrics, refused
from tiny_run import saved_tensors as tensors_of

from tests.marks import others_slow

ITERATIONS = 4
TEACHER = ("--train-iters", 8, *ONE_MICROBATCH, "--lr-decay-style", "constant")
STUDENT = ("--train-iters", ITERATIONS, *ONE_MICROBATCH, "--finetune", "--lr", 1e-3,
           "--lr-decay-style", "constant")  # fmt: skip
EXPERTS = ("--num-experts", 4, "--moe-router-topk", 2)
QUANTIZED = ("--precision-recipe", "qat-mxfp4")


@pytest.fixture
def teacher(memory, pretrain_here, tmp_path_factory) -> Path:
    """Folder of a checkpoint, trained once."""
    if "teacher" not in memory:
        memory["teacher"] = tmp_path_factory.mktemp("teacher")
        done(pretrain_here(*TEACHER, "--save", memory["teacher"]))
    return memory["teacher"]


def arguments(teacher: Path, save: Path, *more: object) -> tuple:
    return (*STUDENT, "--load", teacher, "--distill-from", teacher, "--save", save, *more)


@pytest.mark.parametrize("model", others_slow([(), HYBRID, EXPERTS], [EXPERTS]))
def test_an_unquantized_student_of_itself_has_nothing_to_learn(pretrain_here, tmp_path, model):
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    done(pretrain_here(*TEACHER, *model, "--save", teacher))
    result = pretrain_here(*arguments(teacher, student, "--weight-decay", 0, *model))
    done(result)
    assert "in training, lm loss is the divergence" in result.stdout
    assert set(losses(student).values()) == {0.0}
    before, after = (
        tensors_of(folder / f"iter_{iteration:07d}", "decoder.")
        for folder, iteration in ((teacher, 8), (student, ITERATIONS))
    )
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)


def test_a_quantized_student_learns_from_its_teacher(pretrain_here, teacher, tmp_path):
    """From new weights; validation has the cross-entropy."""
    run = (*TEACHER, *QUANTIZED, "--distill-from", teacher, "--save", tmp_path)
    done(pretrain_here(*run, "--eval-iters", 1))
    first, *_, last = losses(tmp_path).values()
    assert 0 < last < first / 2
    (validation,) = (m["validation_loss"] for m in metrics(tmp_path) if "validation_loss" in m)
    assert validation == pytest.approx(losses(teacher)[8], rel=0.1)


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one(pretrain_here, pretrain_ranks, teacher, tmp_path):
    done(pretrain_here(*arguments(teacher, tmp_path / "one", *QUANTIZED)))
    split = {
        "tensor": ("--tensor-model-parallel-size", 2, "--sequence-parallel"),
        "data": ("--micro-batch-size", 1),
    }
    job = {name: arguments(teacher, tmp_path / name, *QUANTIZED, *split[name]) for name in split}
    pretrain_ranks(job)
    expected = losses(tmp_path / "one")
    for name in split:
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-3)


def test_a_resumed_run_repeats_the_losses(pretrain_here, teacher, tmp_path):
    run = (*STUDENT, *QUANTIZED, "--distill-from", teacher, "--save-interval", 2)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done(pretrain_here(*run, "--load", teacher, "--save", whole))
    again = [word for word in run if word != "--finetune"]
    done(pretrain_here(*again, "--load", whole, "--ckpt-step", 2, "--save", resumed))
    assert losses(resumed) == {k: v for k, v in losses(whole).items() if k > 2}
    check_same_tensors(whole, resumed, ITERATIONS)


def test_a_teacher_of_another_model_is_refused(pretrain_here, teacher, tmp_path):
    more = ("--rotary-base", 500, "--resume-changed", "model")
    line = refused(pretrain_here(*arguments(teacher, tmp_path, *more)))
    error = f"error: --distill-from {teacher}/iter_0000008: a teacher of another model: "
    assert line == f"{error}--rotary-base 500 instead of 10000"
