"""--log-quantization-error-interval: every layer's figures, and the same training as without."""

import math

import pytest
from tiny_run import done, metrics, steps

RECIPE = ("--fp4-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none", "--train-iters", 4)
LOGGED = ("--log-quantization-error-interval", 2)


def logged(folder) -> dict[int, dict[str, float]]:
    """By iteration, without the metric's name."""
    return {
        line["iteration"]: {
            name.removeprefix("quantization/"): value
            for name, value in line.items()
            if name.startswith("quantization/")
        }
        for line in metrics(folder)
        if any(name.startswith("quantization/") for name in line)
    }


@pytest.mark.slow
def test_two_ranks(pretrain_ranks, tmp_path):
    two = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
    pretrain_ranks({
        "off": (*RECIPE, *two, "--save", tmp_path / "off"),
        "on": (*RECIPE, *two, *LOGGED, "--save", tmp_path / "on"),
    })  # fmt: skip
    check(tmp_path)


def test_every_layer_and_the_same_training(pretrain_here, tmp_path):
    done(pretrain_here(*RECIPE, "--save", tmp_path / "off"))
    done(pretrain_here(*RECIPE, *LOGGED, "--save", tmp_path / "on"))
    check(tmp_path)


def check(tmp_path) -> None:
    assert steps(tmp_path / "on") == steps(tmp_path / "off")
    assert logged(tmp_path / "off") == {}
    found = logged(tmp_path / "on")
    assert found.keys() == {1, 3}
    layers = {name.split("/")[0] for name in found[3]}
    names = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert len(layers) == 4 * 4 and all(any(n in layer for n in names) for layer in layers)
    for layer in layers:
        for operand in ("fprop/input", "fprop/weight", "dgrad/grad", "wgrad/grad", "wgrad/input"):
            assert 10 < found[3][f"{layer}/{operand}/sqnr_db"] < 30
        for gemm in ("fprop", "dgrad", "wgrad"):
            assert 0.03 < found[3][f"{layer}/{gemm}/error"] < 0.5
        assert math.isfinite(found[3][f"{layer}/wgrad/grad/amax"])


@pytest.mark.parametrize("number", ["-1", "x"])
def test_an_interval_that_is_none(pretrain_here, number):
    assert pretrain_here(*RECIPE, "--log-quantization-error-interval", number).returncode == 2
