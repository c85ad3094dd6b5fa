"""Codes of the fused all-reduce as the input of the linear layer after the norm."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_lowbit.collectives.all_reduce_norm import all_reduce_norm, fill
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.megatron.features.allreduce_norm import PrecomputedNorm, _AddAndNormalize
from megatron_lowbit.megatron.layers.state import LayerPlan, LayerState
from megatron_lowbit.numerics import Operand
from megatron_lowbit.recipes import Layer, load_recipe

ENGINE = ReferenceEngine("tests")
CPU = torch.device("cpu")


def run(x, residual, norm, gain, request, keep_normalized, out):
    """Compute the fused operation for one rank."""
    return fill(out, all_reduce_norm(None, x, residual, norm, gain, request))


@pytest.fixture
def layer(monkeypatch):
    """Build (addition and normalization, norm, linear layer) with a recipe."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)

    def make(recipe, *overrides, evaluates=False):
        precision = load_recipe(recipe, overrides).precision_for(Layer("decoder.x", 4, 9))
        plan = LayerPlan(Layer("decoder.x", 4, 9), precision, ENGINE, False, None, evaluates)
        linear = torch.nn.Linear(128, 32, bias=False)
        linear.layer_state = LayerState(plan, CPU)
        norm = PrecomputedNorm(torch.nn.RMSNorm(128, eps=1e-5))
        return _AddAndNormalize(run, norm, linear), norm, linear

    return make


def add(function, dtype=torch.bfloat16):
    draws = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(8, 2, 128, generator=draws).to(dtype) for _ in range(2))
    return function.add((x.requires_grad_(), None), residual, 0.0)


@pytest.mark.parametrize("recipe", ["fp8-tile", "fp8-row", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_rows(layer, recipe, dtype):
    """Codes and rows give the same bits, forward and backward."""
    function, norm, linear = layer(recipe)
    norm.to(dtype)
    y = norm(add(function, dtype))
    operand = linear.layer_state.operand_of(y)
    assert isinstance(operand, Operand) and operand.source is y
    precision = linear.layer_state.plan.precision
    weight = linear.weight.detach().to(dtype).requires_grad_()
    results = []
    for given in (operand, y):
        out = lowbit_linear(given, weight, LinearContext(precision, ENGINE, 5))
        results.append((out, *torch.autograd.grad(out.sum(), (y, weight), retain_graph=True)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_sum_made_without_gradients_is_normalized_again(layer):
    """Recomputation gives the last sum another graph, of which the result is no part."""
    function, norm, _ = layer("fp8-tile")
    draws = torch.Generator().manual_seed(4)
    leaves = [torch.randn(2, 1, 128, generator=draws).requires_grad_() for _ in range(2)]

    def part(x, residual):
        return function.add((x, None), residual, 0.0)

    def gradients(total):
        norm(total).pow(3).sum().backward()
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    recomputed = gradients(checkpoint(part, *leaves, use_reentrant=True))
    for seen, expected in zip(recomputed, gradients(part(*leaves)), strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)
        assert expected.abs().max() > 1e-3


def test_another_tensor_is_quantized_by_the_layer(layer):
    function, norm, linear = layer("fp8-tile")
    y = norm(add(function))
    other = y.clone()
    assert linear.layer_state.operand_of(other) is other
    # The result applies to the next input only.
    assert linear.layer_state.operand_of(y) is y


@pytest.mark.parametrize(
    "overrides",
    [["input.format=null"], ["input.rounding=stochastic"], ["input.format=fp8-tensor-e4m3"]],
)
def test_what_the_kernel_does_not_cast(layer, overrides):
    function, norm, linear = layer("fp8-tile", *overrides)
    y = norm(add(function))
    assert linear.layer_state.operand_of(y) is y


def test_evaluations_in_high_precision_have_no_codes(layer):
    for evaluates in (False, True):
        function, norm, linear = layer("fp8-tile", evaluates=evaluates)
        linear.eval()
        with torch.no_grad():
            y = norm(add(function))
        assert isinstance(linear.layer_state.operand_of(y), Operand) is evaluates


def test_delayed_scaling_leaves_the_cast_to_the_layer(layer):
    """The layer has to record the amaxes for NVFP4's tensor scale of later steps."""
    function, norm, linear = layer("nvfp4", "amax_history={length: 4}")
    state = linear.layer_state
    y = norm(add(function))
    assert state.operand_of(y) is y and state.amax_history.step[0] == -1.0
