"""Runs of pretrain_gpt.py: loss, evaluation and output files."""

import runpy
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import (
    ONE_MICROBATCH,
    ROOT,
    Result,
    arguments_for,
    done,
    losses,
    metrics,
    refused,
    steps,
)

NVFP4 = ("--fp4-recipe", "nvfp4")
EVALUATION = ("--eval-iters", 1, "--eval-interval", 3)


def test_a_run_leaves_checkpoint_metrics_and_picture(pretrain_command, tmp_path):
    save = tmp_path / "run"
    result = pretrain_command(
        *NVFP4, *EVALUATION, "--train-iters", 6, "--save", save, "--tensorboard-dir", save / "board"
    )
    done(result)
    assert "8 of 16 linear layers quantized" in result.stdout
    assert "quantization engine: reference" in result.stdout
    assert (save / "iter_0000006" / "lowbit.json").is_file()
    assert (save / "loss.png").read_bytes().startswith(b"\x89PNG")
    curve = losses(save)
    assert list(curve) == [1, 2, 3, 4, 5, 6]
    # The words of the made-up language are drawn apart from each other: 300 words, 5.2 nats.
    assert curve[6] < curve[1] - 0.5
    lines = metrics(save)
    assert [line["iteration"] for line in lines if "validation_loss" in line] == [3, 6]
    assert "tokens_per_second" not in lines[0]  # it contains compiling
    assert set(lines[1]) >= {
        "iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_tokens",
        "tokens_per_second",
    }  # fmt: skip
    assert [line["consumed_tokens"] for line in lines] == [128 * n for n in range(1, 7)]
    board = EventAccumulator(str(save / "board")).Reload()
    on_board = {event.step: event.value for event in board.Scalars("lm loss")}
    assert on_board == curve


def test_evaluation_changes_nothing(pretrain_here, tmp_path):
    dropout = ("--hidden-dropout", 0.1, "--attention-dropout", 0.1)
    for name, more in (("with", ("--eval-iters", 1, "--eval-interval", 1)), ("without", ())):
        options = (*dropout, *ONE_MICROBATCH, "--train-iters", 2, "--save", tmp_path / name)
        done(pretrain_here(*NVFP4, *options, *more))
    assert steps(tmp_path / "with") == steps(tmp_path / "without")
    assert not any("validation_loss" in line for line in metrics(tmp_path / "without"))


def test_finetuning_begins_with_the_model_at_iteration_0(pretrain_here, tmp_path):
    """A learning rate of 0 keeps the model and thus its loss on the training data."""
    first, second = tmp_path / "first", tmp_path / "second"
    done(pretrain_here(*NVFP4, "--train-iters", 3, "--save", first))
    load = ("--load", first, "--finetune", "--lr", 0)
    done(pretrain_here(*NVFP4, "--train-iters", 1, *load, "--save", second))
    before, after = losses(first), losses(second)
    assert after.keys() == {1}
    assert after[1] < before[1] - 0.2


def test_scripts_name_each_other(corpus, monkeypatch, capsys):
    arguments = arguments_for(corpus, ("--hybrid-layer-pattern", "M-", "--train-iters", 1))
    script = str(ROOT / "pretrain_gpt.py")
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert "use pretrain_hybrid.py" in refused(
        Result(ended.value.code, "", capsys.readouterr().err)
    )
