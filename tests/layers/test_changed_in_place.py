"""Weights and inputs that change in place between forward and backward: as with nn.Linear."""

from dataclasses import replace

import pytest
import torch
from one_layer import ENGINE, history, precision_of

from megatron_lowbit.layers import (
    GroupContext,
    LinearContext,
    WeightCache,
    lowbit_grouped_linear,
    lowbit_linear,
)
from megatron_lowbit.layers.grouped import can_group
from megatron_lowbit.layers.mxnorm import mxnorm_linear
from megatron_lowbit.recipes import LinearPrecision, load_recipe, shipped_recipes

CHANGED = "modified by an inplace operation"
PRECISIONS = {
    f"{name} {config}": precision
    for name in shipped_recipes()
    for config, precision in load_recipe(name).configs.items()
    if precision.quantized or name == "bf16"
} | {
    change: load_recipe("nvfp4", [change]).configs["nvfp4"]
    for change in ("fallback=bf16", "fprop.hot_channels=0.1")
}
# One of each way to make the operands of backward; the others differ in formats.
QUICK = ("bf16 bf16", "nvfp4 nvfp4", "averis nvfp4", "fp8-delayed fp8", "fp8-row fp8",
         "fp8-tile fp8", "mxfp4-backward mxfp4", "nvfp4-backward nvfp4", "qat-nvfp4 nvfp4",
         "qat-mxfp8-activations mxfp8", "quartet2 nvfp4", "tetrajet2 fp4", "torchao-v2 nvfp4",
         "fallback=bf16", "fprop.hot_channels=0.1")  # fmt: skip
each_precision = pytest.mark.parametrize(
    "precision",
    [
        pytest.param(precision, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name, precision in PRECISIONS.items()
    ],
)


def context_of(precision: LinearPrecision, **options) -> LinearContext:
    known = history(precision.history_length) if precision.history_length else None
    return LinearContext(precision, ENGINE, key=3, amax_history=known, **options)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws, requires_grad=True)


def change(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(3)


def assert_raises_as_linear(y: torch.Tensor, weight: torch.Tensor) -> None:
    """Check that backward works before the weight changes, and raises afterwards."""
    y.sum().backward(retain_graph=True)
    change(weight)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@each_precision
@pytest.mark.parametrize("cached", [False, True])
def test_changed_weight(precision, cached):
    """Backward quantizes the weight, or forward did, or a cache has it."""
    context = context_of(precision, weight_cache=WeightCache() if cached else None)
    x, weight = leaf(32, 64), leaf(48, 64, seed=1)
    for _ in range(2):  # the second call takes the weight from the cache
        y = lowbit_linear(x, weight, context)
        assert_raises_as_linear(y, weight)


@each_precision
@pytest.mark.parametrize("saves_input", [False, True])
def test_changed_input(precision, saves_input):
    """Gradients belong to the input that forward multiplied, or torch raises."""
    weight, dy = leaf(48, 64, seed=1), torch.randn(32, 48)
    gradients = []
    for changes in (False, True):
        x = leaf(32, 64)
        y = lowbit_linear(x, weight, context_of(precision, saves_input=saves_input))
        if changes:
            change(x)
        try:
            gradients.append(torch.autograd.grad(y, (x, weight), dy))
        except RuntimeError as error:
            assert changes and CHANGED in str(error)
            return
    assert not saves_input
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@each_precision
def test_weight_that_backward_does_not_multiply(precision):
    """As nn.Linear, without a gradient of the input."""
    weight = leaf(48, 64, seed=1)
    y = lowbit_linear(leaf(32, 64).detach(), weight, context_of(precision))
    change(weight)
    y.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp4-backward", "fp8-tile", "qat-nvfp4"])
@pytest.mark.parametrize("together", [False, True])
def test_changed_experts(recipe, together):
    precision = precision_of(recipe)
    context = context_of(precision)
    if together and not can_group(context):
        pytest.skip("computed one by one")
    x, weights = leaf(32, 64), [leaf(48, 64, seed=seed) for seed in range(3)]
    contexts = GroupContext(context, [1, 2, 3]) if together else [context] * 3
    y = lowbit_grouped_linear(x, weights, contexts, [9, 0, 23], [None] * 3)
    assert_raises_as_linear(y, weights[2])


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "mxfp4-backward"])
@pytest.mark.parametrize("changed", ["gain", "weight"])
def test_changed_norm(recipe, changed):
    precision = precision_of(recipe)
    if recipe == "mxfp4-backward":
        precision = replace(precision, fprop=load_recipe("mxfp4").configs["mxfp4"].fprop)
    tensors = {"x": leaf(32, 64), "gain": leaf(64, seed=1), "weight": leaf(48, 64, seed=2)}
    y = mxnorm_linear(*tensors.values(), context_of(precision))
    assert_raises_as_linear(y, tensors[changed])
