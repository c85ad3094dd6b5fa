"""Validation without quantization, or in the recipe's precision."""

import pytest
from tiny_run import ONE_MICROBATCH, done, metrics, steps

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
    if not memory:
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


def test_validation_in_the_recipes_precision(pretrain_here, tmp_path, capsys):
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
