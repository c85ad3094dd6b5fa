"""A weight is quantized once for all microbatches of a step, unless its bits are redrawn."""

import pytest
import torch
from one_layer import ENGINE, history, leaves

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import LinearContext, WeightCache, lowbit_linear
from megatron_lowbit.recipes import OPERANDS, Layer, load_recipe

LAYER = Layer("decoder.layers.5.mlp.linear_fc1", 5, 30)


def tensors():
    return leaves(32, 48, 64, seed=3)


def run(recipe, overrides, cache, microbatches=2):
    """Return results of all microbatches, and how often the weight was quantized."""
    x, weight, dy = tensors()
    times, results = 0, []

    def quantize(tensor, row, col, amaxes):
        nonlocal times
        times += tensor is weight
        return ENGINE.quantize(tensor, row, col, amaxes)

    engine = ReferenceEngine("tests")
    engine.quantize = quantize
    precision = load_recipe(recipe, overrides).precision_for(LAYER)
    length, known = precision.history_length, None
    if length:  # of one step, whose amaxes are twice the step's own
        known = history(length)
        known.advance(torch.full((len(OPERANDS),), 2.0))
    for key in range(microbatches):
        context = LinearContext(precision, engine, key, amax_history=known, weight_cache=cache)
        y = lowbit_linear(x, weight, context)
        results += [y, *torch.autograd.grad(y, (x, weight), dy)]
    return results + ([known.step] if length else []), times


@pytest.mark.parametrize(
    "recipe, overrides",
    [
        ("nvfp4", []), ("fp8-tile", []), ("mxfp8", []), ("nvfp4", ["weight.format=nvfp4"]),
        ("fp8-delayed", []), ("fp8-delayed", ["amax_history.just_in_time=1"]),
    ],
    ids=str,
)  # fmt: skip
def test_once_for_all_microbatches_with_the_same_bits(recipe, overrides):
    """Amaxes of a weight under delayed scaling are recorded as often, to the same effect."""
    apart, each = run(recipe, overrides, None)
    together, once = run(recipe, overrides, WeightCache())
    assert (each, once) == (2, 1)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def test_a_weight_whose_bits_are_redrawn_is_not_kept():
    cache = WeightCache()
    _, times = run("mxfp4-backward", [], cache)
    assert times == 2 and cache.operands is None


def test_what_autograd_does_not_record_is_not_kept():
    x, weight, _ = tensors()
    cache = WeightCache()
    precision = load_recipe("nvfp4", []).precision_for(LAYER)
    with torch.no_grad():
        lowbit_linear(x, weight, LinearContext(precision, ENGINE, 0, weight_cache=cache))
    assert cache.operands is None


def test_a_changed_weight_needs_the_cache_emptied():
    x, weight, _ = tensors()
    cache = WeightCache()
    precision = load_recipe("nvfp4", []).precision_for(LAYER)

    def product():
        return lowbit_linear(x, weight, LinearContext(precision, ENGINE, 0, weight_cache=cache))

    before = product()
    with torch.no_grad():
        weight.mul_(-1)
    assert torch.equal(product(), before)
    cache.operands = None
    assert torch.equal(product(), -before)
