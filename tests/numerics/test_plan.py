"""Plans of a linear layer's operands: sources, and what forward saves and gathers."""

import pytest

from megatron_lowbit.numerics.plan import Saved, Source
from megatron_lowbit.recipes import OPERANDS, load_precision, load_recipe

AGAIN = Source.REQUANTIZED
OPERAND, FPROP, TENSOR = Saved
ROWS = ["weight.format=nvfp4"]
DRAWN = [*ROWS, "weight.rounding=stochastic"]
OF_FPROP = [*ROWS, "wgrad.hadamard=none", "weight.axis=fprop", "input.axis=fprop"]
REQUANTIZED = [*ROWS, "weight.requantize=true", "input.requantize=true"]
MEANS = [*OF_FPROP, "input.split_mean=true", "grad.split_mean=true", "grad.axis=dgrad"]


def plan_of(overrides, *arguments, name="nvfp4"):
    precision = load_precision(load_recipe(name, overrides))
    return precision.plan(*arguments)


def test_the_six_operands():
    assert tuple(plan_of([])) == OPERANDS


@pytest.mark.parametrize(
    ("overrides", "weight", "wgrad_input"),
    [
        ([], (Source.TRANSPOSE, OPERAND), (Source.TENSOR, OPERAND)),
        (ROWS, (Source.TENSOR, OPERAND), (Source.TENSOR, OPERAND)),
        (DRAWN, (Source.TENSOR, TENSOR), (Source.TENSOR, OPERAND)),
        (OF_FPROP, (Source.DEQUANTIZED, FPROP), (Source.DEQUANTIZED, FPROP)),
        (REQUANTIZED, (AGAIN, TENSOR), (AGAIN, FPROP)),
        (["fallback=bf16"], (Source.TRANSPOSE, OPERAND), (Source.TENSOR, TENSOR)),
    ],
)
def test_operands_of_the_backward_pass(overrides, weight, wgrad_input):
    plan = plan_of(overrides)
    for operand, expected in (("dgrad", "weight"), weight), (("wgrad", "input"), wgrad_input):
        assert (plan[operand].source, plan[operand].saved) == expected
    evaluated = plan_of(overrides, False)
    assert not any(operand.saved for operand in evaluated.values())


@pytest.mark.parametrize(
    ("overrides", "tokens", "gathers"),
    [
        ([], 32, (True, True)),
        ([], 24, (True, False)),  # the transform of 16 crosses ranks
        (OF_FPROP, 24, (True, True)),  # fprop's codes serve wgrad
        (MEANS, 32, (False, False)),  # means are those of all ranks' tokens
        (["fprop.fallback=bf16"], 32, (False, True)),
        (["fprop.hot_channels=0.1"], 32, (False, True)),
        (["input.format=nvfp4-2d"], 24, (False, False)),
    ],
)
def test_what_sequence_parallelism_gathers_as_codes(overrides, tokens, gathers):
    plan = plan_of(overrides, True, tokens)
    inputs = [plan[gemm, "input"] for gemm in ("fprop", "wgrad")]
    assert tuple(operand.gathers_codes for operand in inputs) == gathers
    assert inputs[1].saved is TENSOR or gathers[1]


def test_an_input_that_is_saved_itself():
    assert plan_of([], True, 0, True)["wgrad", "input"].saved is TENSOR


def test_a_plan_is_made_once():
    precision = load_recipe("nvfp4").configs["nvfp4"]
    assert precision.plan() is precision.plan(True, 0)
