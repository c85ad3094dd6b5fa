"""The Python API: arguments that it takes or refuses by name, text that it prints, its names."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import megatron_lowbit
from megatron_lowbit import (
    LowbitLinear,
    QuantizedTensor,
    convert,
    load_recipe,
    lowbit_linear,
    quantize,
)
from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import linear
from megatron_lowbit.numerics import FORMATS
from megatron_lowbit.recipes import HIGH_PRECISION, load_precision, shipped_recipes

ROOT = Path(__file__).parents[1]
X, WEIGHT = torch.randn(32, 64), torch.randn(48, 64)
NVFP4 = load_recipe("nvfp4").configs["nvfp4"]
ARRAY = np.zeros((4, 64), np.float32)


def test_a_recipe_in_place_of_a_precision(monkeypatch, tmp_path):
    """By its name, by its file and itself."""
    monkeypatch.setattr(linear, "select_engine", lambda device: ReferenceEngine("tests"))
    file = tmp_path / "mine.yaml"
    file.write_text((ROOT / "recipes" / "nvfp4.yaml").read_text())
    for recipe in ("nvfp4", load_recipe("nvfp4"), NVFP4, str(file)):
        assert LowbitLinear(64, 48, precision=recipe).precision == NVFP4
        torch.manual_seed(3)
        given = lowbit_linear(X, WEIGHT, recipe)
        torch.manual_seed(3)
        assert torch.equal(given, lowbit_linear(X, WEIGHT, NVFP4))


def test_the_precision_of_every_shipped_recipe():
    refused = {}
    for name in shipped_recipes():
        recipe = load_recipe(name)
        quantizing = [config for config in recipe.configs.values() if config.quantized]
        try:
            assert load_precision(name) == (quantizing or [HIGH_PRECISION])[0]
            assert len(quantizing) <= 1
        except UserError as error:
            refused[name] = str(error)
    assert refused.keys() == {"nemotron3-super", "nvfp4-late-bf16", "torchao-v2-late-bf16"}
    offered = re.findall(r"load_recipe\S+", refused["nemotron3-super"])
    assert [eval(text) for text in offered] == [
        load_recipe("nemotron3-super").configs[name] for name in ("nvfp4", "mxfp8")
    ]


def test_changes_of_a_recipe_as_on_a_command_line():
    change = "grad.rounding=nearest"
    expected = load_recipe("nvfp4", [change])
    assert load_recipe("nvfp4", change) == load_recipe("nvfp4", (change,)) == expected
    assert load_recipe(ROOT / "recipes" / "nvfp4.yaml", change) == expected != load_recipe("nvfp4")


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "mxfp6", "nv", "int4", "zzz", "", "nvpf4"])
def test_offered_formats_are_accepted(name):
    with pytest.raises(ValueError, match="unknown format") as refused:
        quantize(X, name)
    hint = re.search("(?:there are|did you mean) (.*?)[?]?$", str(refused.value))[1]
    assert set(hint.split(", ")) <= FORMATS.keys()
    for offered in hint.split(", "):
        if offered != "ms-eden":  # which rounds stochastically alone
            assert quantize(X, offered).format == FORMATS[offered]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: quantize(ARRAY, "nvfp4"), "x is a NumPy array, not a tensor"),
        (lambda: quantize([1.0], "nvfp4"), "x is a list, not a tensor"),
        (lambda: quantize(X, None), "the format is None, not a format's name"),
        (lambda: lowbit_linear(ARRAY, WEIGHT, NVFP4), "x is a NumPy array, not a tensor"),
        (lambda: lowbit_linear(X, ARRAY, NVFP4), "weight is a NumPy array, not a tensor"),
        (lambda: lowbit_linear(X, WEIGHT, NVFP4, [0.0]), "bias is a list, not a tensor"),
        (lambda: lowbit_linear(X, WEIGHT, 3), "is an int, not a LinearPrecision, a recipe or a"),
        (lambda: LowbitLinear(8, 8, precision=None), "is None, not a LinearPrecision, a recipe or"),
        (lambda: LowbitLinear(64, 8, precision=NVFP4)(ARRAY), "is a NumPy array, not a tensor"),
        (lambda: load_recipe(3), "name_or_path is an int, not the name or the path of a recipe"),
        (lambda: load_recipe("nvfp4", [3]), "an override is an int, not FIELD=VALUE"),
        (lambda: convert("model", "nvfp4"), "model is a str, not an nn.Module"),
        (lambda: convert(nn.Linear(2, 2), NVFP4), "recipe is a LinearPrecision, not a recipe or"),
        (lambda: convert(nn.Linear(2, 2), "fp8-tile", blocks=3), "blocks is an int, not a path or"),
    ],
)
def test_arguments_of_another_type_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_an_unknown_precision_in_evaluation_is_refused():
    message = "eval_precision='fp8' is not one of bf16, recipe"
    with pytest.raises(UserError, match=message):
        LowbitLinear(64, 48, precision=NVFP4, eval_precision="fp8")
    with pytest.raises(UserError, match=message):
        convert(nn.Sequential(nn.Linear(64, 48)), "fp8-tile", blocks="", eval_precision="fp8")


def test_what_is_printed():
    """A few lines; the one of a recipe has all that decides."""
    q = quantize(X, "nvfp4")
    assert repr(q) == (
        "QuantizedTensor(nvfp4, shape=(32, 64), device=cpu, codes=uint8 (32, 32), "
        "scales=float8_e4m3fn (32, 4))"
    )
    recipe = load_recipe("nvfp4-late-bf16")
    assert repr(recipe) == str(recipe) and len(repr(recipe).splitlines()) == 6
    for name in shipped_recipes():
        assert len(repr(load_recipe(name)).splitlines()) <= 10
    changes = (
        "grad.rounding=nearest", "bf16_blocks.last=5", "weight.block_scales=foldable",
        "wgrad.hadamard.size=32", "switches.late={iteration: 3, to: bf16, part: all}",
    )  # fmt: skip
    printed = {repr(load_recipe("nvfp4", change)) for change in changes}
    assert len(printed) == len(changes)


@pytest.mark.parametrize("package", ["megatron_lowbit", "megatron_lowbit.recipes"])
def test_public_names_are_listed(package):
    module = importlib.import_module(package)
    assert set(module.__all__) | {"__name__"} <= set(dir(module))
    assert QuantizedTensor in [getattr(megatron_lowbit, name) for name in dir(megatron_lowbit)]
