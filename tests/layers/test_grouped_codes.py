"""Experts whose wgrad requantizes fprop's input, which may come as codes of all tokens."""

import pytest
import torch

from megatron_lowbit.kernels.engine import Engine, ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.kernels.operand_group import OperandGroup
from megatron_lowbit.kernels.split import RowSlices, rows_of
from megatron_lowbit.layers import (
    GroupContext,
    LinearContext,
    counts_on_device,
    lowbit_grouped_linear,
    lowbit_linear,
)
from megatron_lowbit.layers.grouped import can_group
from megatron_lowbit.numerics import Operand
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.recipes import Layer, load_recipe
from tests.marks import by_turns

TOKENS = [20, 0, 7, 37]
NOTHING = [None] * len(TOKENS)
LAYER = Layer("decoder.layers.4.mlp.experts.local_experts.0.linear_fc1", 4, 10)
REFERENCE, FUSED = ReferenceEngine("tests"), FusedEngine((9, 0))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ["fp8-tile", "mxfp8", "fp8-row", "fp8-tile-e4m3", "mxfp4"]


def context_of(recipe: str, engine: Engine, *overrides: str) -> LinearContext:
    recipe = load_recipe(recipe, ["wgrad.input.requantize=true", *overrides])
    return LinearContext(recipe.precision_for(LAYER), engine, key=3)


def group_of(context: LinearContext) -> GroupContext:
    assert can_group(context)
    return GroupContext(context, range(len(TOKENS)))


def draws(dtype=torch.float32, device="cpu", columns=160) -> tuple:
    generator = torch.Generator().manual_seed(5)
    sizes = [(sum(TOKENS), columns), (sum(TOKENS), 48), *[(48, columns)] * len(TOKENS)]
    x, grad, *weights = (torch.randn(s, generator=generator).to(device, dtype) for s in sizes)
    return x.requires_grad_(), grad, [weight.requires_grad_() for weight in weights]


def codes_of(context: LinearContext, x: torch.Tensor) -> Operand:
    """Return the codes of all tokens, with a tensor that has none of their values."""
    row, _ = context.quantize(x.detach(), Role.INPUT, Gemm.FPROP, None, needs_codes=True)
    source = torch.full_like(x[:1, :1], torch.nan).detach().expand(x.shape).requires_grad_()
    return Operand(row, None, source)


def results(x, weights, grad, group, tokens=TOKENS) -> list[torch.Tensor]:
    source = x.source if isinstance(x, Operand) else x
    y = lowbit_grouped_linear(x, weights, group, tokens, NOTHING)
    return [y.detach(), *torch.autograd.grad(y, [source, *weights], grad)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_have_the_results_of_the_tokens(recipe):
    """They equal a linear layer for each expert, too."""
    context, (x, grad, weights) = context_of(recipe, REFERENCE), draws()
    found = results(codes_of(context, x), weights, grad, group_of(context))
    parts = zip(x.split(TOKENS), weights, TOKENS, range(len(TOKENS)), strict=True)
    alone = torch.cat(
        [
            lowbit_linear(part, weight, LinearContext(context.precision, REFERENCE, key))
            for part, weight, count, key in parts
            if count
        ]
    )
    gradients = torch.autograd.grad(alone, [x, *weights], grad, materialize_grads=True)
    expected = results(x, weights, grad, group_of(context))
    for one, other, each in zip(found, expected, [alone, *gradients], strict=True):
        assert torch.equal(one, other) and torch.equal(one, each)


@pytest.mark.parametrize(
    ("recipe", "sends", "decoded"),
    [("fp8-tile", True, 1), ("fp8-tile", False, 1), ("fp8-row", True, 1), ("nvfp4", False, 4)],
)
def test_wgrad_decodes_all_tokens_at_once(recipe, sends, decoded, monkeypatch):
    """Experts whose rows share scales are decoded one by one."""
    calls, dequantize = [], REFERENCE.dequantize

    def counted(*args):
        calls.append(args)
        return dequantize(*args)

    monkeypatch.setattr(REFERENCE, "dequantize", counted)
    context, (x, grad, weights) = context_of(recipe, REFERENCE), draws()
    results(codes_of(context, x) if sends else x, weights, grad, group_of(context))
    assert len(calls) == decoded


@pytest.mark.parametrize("recipe", ["fp8-tile", "fp8-row"])
def test_wgrad_multiplies_requantized_tokens(recipe):
    """The products are those in float64 but for the order of FP32's sums."""
    context, (x, grad, weights) = context_of(recipe, REFERENCE), draws()
    # More than a block's FP8 numbers span, so that requantizing rounds.
    x = x * 2.0 ** (8 * (torch.arange(len(x)) % 5))[:, None]
    _, _, *wgrads = results(codes_of(context, x), weights, grad, group_of(context))
    fprop, wgrad = context.precision.fprop, context.precision.wgrad
    parts = zip(x.detach().split(TOKENS), grad.split(TOKENS), wgrads, strict=True)
    for tokens, dy, found in parts:
        values = fprop.lhs(tokens).dequantize()
        again = wgrad.rhs(values.bfloat16().t()).dequantize().double()
        left = wgrad.lhs(dy.t()).dequantize().double()
        most = left.abs() @ again.abs().t()
        assert ((found - left @ again.t()).abs() <= 2.0**-20 * most).all()
        assert not torch.equal(again, values.double().t()) or not len(tokens)


def test_kernels_have_the_same_results_for_codes():
    context = context_of("fp8-tile", FUSED)
    x, grad, weights = draws(torch.bfloat16, DEVICE, 128)
    found = results(codes_of(context, x), weights, grad, group_of(context))
    expected = results(x, weights, grad, group_of(context))
    assert [bool(one.any()) for one in found] == [True, True, *map(bool, TOKENS)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("recipe", "engine"), by_turns(["fp8-tile", "mxfp8"], [REFERENCE, FUSED]))
def test_a_rank_without_tokens(recipe, engine):
    context, (x, grad, weights) = context_of(recipe, engine), draws(torch.bfloat16, DEVICE, 64)
    codes = codes_of(context, x[:0])
    y, dx, *wgrads = results(codes, weights, grad[:0], group_of(context), [0] * len(TOKENS))
    assert y.shape == (0, 48) and dx.shape == (0, x.shape[1])
    assert not any(wgrad.any() for wgrad in wgrads)


@pytest.mark.parametrize(
    ("recipe", "columns"), by_turns(["fp8-tile", "mxfp8", "fp8-tile-e4m3", "mxfp4"], [128, 160])
)
def test_codes_lie_where_one_launch_writes_those_of_the_experts(recipe, columns):
    context, (x, *_) = context_of(recipe, FUSED), draws(torch.bfloat16, DEVICE, columns)
    group, rows = group_of(context), rows_of(tuple(TOKENS))
    xs = RowSlices(x.detach(), rows)
    placed, _ = group.fprop_inputs(xs, codes_of(context, x).row, keep=True)
    expected, _ = group.quantize(xs, Role.INPUT, Gemm.FPROP, None)
    assert isinstance(placed, OperandGroup) and placed.layout is expected.layout
    for one, other in zip(placed, expected, strict=True):
        assert (one.shape, one.format) == (other.shape, other.format)
        assert one.scales.stride() == other.scales.stride()
        for mine, theirs in ((one.codes, other.codes), (one.scales, other.scales)):
            assert torch.equal(mine.float(), theirs.float())


def test_codes_are_refused_where_values_are_needed():
    x, _, weights = draws()
    context = LinearContext(load_recipe("fp8-tile").precision_for(LAYER), REFERENCE, key=3)
    for contexts in (group_of(context), [context] * len(TOKENS)):
        with pytest.raises(ValueError, match=r"^x: codes need one context, with wgrad\.input"):
            lowbit_grouped_linear(codes_of(context, x), weights, contexts, TOKENS, NOTHING)


def test_wgrads_of_fprops_values_and_of_requantized_weights_are_not_grouped():
    for override in ("dgrad.weight.requantize=true", "wgrad.grad.axis=dgrad"):
        assert not can_group(context_of("mxfp8", REFERENCE, override))


def test_the_host_reads_the_numbers_of_requantized_tokens():
    context = context_of("fp8-tile", FUSED)
    assert not counts_on_device(context, [torch.empty(48, 64, dtype=torch.bfloat16)] * 4, 64)
