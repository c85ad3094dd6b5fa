"""Runs of one process: output files, evaluation, and parts of training that have one test."""

import os
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

from megatron_lowbit.megatron.layers.state import LayerState
from megatron_lowbit.recipes import LinearPrecision

NVFP4 = ("--fp4-recipe", "nvfp4")
EVALUATION = ("--eval-iters", 1, "--eval-interval", 3)


def test_a_run_takes_its_process_groups_with_it(pretrain_here):
    threads = []
    for _ in range(2):
        done(pretrain_here("--train-iters", 1, "--use-distributed-optimizer"))
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[1] == threads[0]


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


def test_a_checkpoint_is_evaluated_without_training(pretrain_here, tmp_path):
    done(pretrain_here(*NVFP4, *ONE_MICROBATCH, "--train-iters", 1, "--save", tmp_path))
    evaluation = ("--train-iters", 2, "--load", tmp_path, "--skip-train", "--eval-iters", 1)
    result = pretrain_here(*NVFP4, *ONE_MICROBATCH, *evaluation)
    done(result)
    assert "validation loss at iteration 1" in result.stdout


def test_scripts_name_each_other(corpus, monkeypatch, capsys):
    arguments = arguments_for(corpus, ("--hybrid-layer-pattern", "M-", "--train-iters", 1))
    script = str(ROOT / "pretrain_gpt.py")
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert "use pretrain_hybrid.py" in refused(
        Result(ended.value.code, "", capsys.readouterr().err)
    )


def test_experts_in_more_layers_than_before(pretrain_here):
    """Megatron-LM allocates its record of auxiliary losses for the layers of the first run."""
    experts = ("--num-experts", 2, "--moe-ffn-hidden-size", 32, "--moe-aux-loss-coeff", 0.01,
               "--moe-router-load-balancing-type", "aux_loss", "--train-iters", 1)  # fmt: skip
    for layers in (1, 2):
        done(pretrain_here(*experts, "--num-layers", layers))


ALL_LAYERS = (*NVFP4, "--recipe-set", "bf16_blocks=none", "--train-iters", 2)


@pytest.mark.parametrize(
    ("owner", "name", "value", "is_same"),
    [
        pytest.param(LinearPrecision, "caches_weight", property(lambda call: False), True,
                     marks=pytest.mark.slow),
        # The comparison can fail.
        (LayerState, "forget_weight", lambda state: None, False),
    ],
)  # fmt: skip
def test_weights_are_kept_over_the_microbatches_of_a_step(
    pretrain_here, memory, tmp_path, monkeypatch, owner, name, value, is_same
):
    """Losses are the same without a cache of quantized weights."""
    if "kept" not in memory:
        done(pretrain_here(*ALL_LAYERS, "--save", tmp_path / "kept"))
        memory["kept"] = losses(tmp_path / "kept")
    monkeypatch.setattr(owner, name, value)
    done(pretrain_here(*ALL_LAYERS, "--save", tmp_path / "other"))
    assert len(memory["kept"]) == 2
    assert (losses(tmp_path / "other") == memory["kept"]) == is_same


def test_swiglus_input_in_fp8(pretrain_here, tmp_path):
    """Megatron-LM keeps it so, under recipes in local layers: gradients change, and only they."""
    for name, more in (("plain", ()), ("stored", ("--activation-func-fp8-input-store",))):
        done(pretrain_here(*NVFP4, "--train-iters", 2, *more, "--save", tmp_path / name))
    (plain, second), (stored, other) = (
        list(steps(tmp_path / name).values()) for name in ("plain", "stored")
    )
    assert stored[0] == plain[0] and other != second
    assert stored[1] != plain[1] and stored[1] == pytest.approx(plain[1], rel=0.02)


# -- validation ------------------------------------------------------------------------------------

# With a rate of 0 all runs have the same weights.
FROZEN = ("--train-iters", 2, "--lr", 0, "--eval-iters", 1, "--eval-interval", 1,
          *ONE_MICROBATCH)  # fmt: skip
RECIPES = {
    "nvfp4": ("--fp4-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none"),
    "fp8-delayed": ("--precision-recipe", "fp8-delayed"),
    "mxnorm": ("--precision-recipe", "mxfp8", "--mxnorm"),
}


def validation(pretrain_here, folder, *arguments) -> list[float]:
    """Return the validation losses of a run."""
    done(pretrain_here(*FROZEN, *arguments, "--save", folder))
    return [line["validation_loss"] for line in metrics(folder) if "validation_loss" in line]


@pytest.mark.parametrize("name", RECIPES)
def test_validation_has_the_bits_of_a_run_without_a_recipe(pretrain_here, tmp_path, memory, name):
    if "vanilla" not in memory:
        memory["vanilla"] = validation(pretrain_here, tmp_path / "vanilla")
    found = validation(pretrain_here, tmp_path / name, *RECIPES[name])
    assert len(found) == 2 and found == memory["vanilla"]


@pytest.mark.slow
def test_two_ranks_validate_without_quantization(pretrain_ranks, tmp_path):
    split = (*FROZEN, "--tensor-model-parallel-size", 2, "--sequence-parallel")
    runs = {
        name: (*split, *recipe, "--save", tmp_path / name)
        for name, recipe in {"vanilla": (), **RECIPES}.items()
    }
    pretrain_ranks(runs)
    found = {
        name: [m["validation_loss"] for m in metrics(tmp_path / name) if "validation_loss" in m]
        for name in runs
    }
    assert len(found["vanilla"]) == 2
    assert all(losses == found["vanilla"] for losses in found.values())


def test_validation_in_the_recipes_precision(pretrain_here, tmp_path):
    default = validation(pretrain_here, tmp_path / "bf16", *RECIPES["nvfp4"])
    asked = ("--eval-precision", "recipe")
    quantized = validation(pretrain_here, tmp_path / "nvfp4", *RECIPES["nvfp4"], *asked)
    assert default != quantized
    assert default == pytest.approx(quantized, rel=2e-2)
    assert steps(tmp_path / "bf16") == steps(tmp_path / "nvfp4")


def test_the_start_says_which(pretrain_here, tmp_path):
    for asked, line in (((), "nothing is quantized"), (("--eval-precision", "recipe"), "in the")):
        result = pretrain_here(*RECIPES["nvfp4"], *asked, *ONE_MICROBATCH, "--train-iters", 1)
        assert f"validation and test: {line}" in result.stdout
