"""Experts quantized together: the bits of a linear layer for each."""

from dataclasses import replace

import pytest
import torch

from megatron_lowbit.kernels import fused
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import (
    GroupContext,
    LinearContext,
    WeightCache,
    lowbit_grouped_linear,
    lowbit_linear,
)
from megatron_lowbit.layers.grouped import can_group
from megatron_lowbit.numerics import AmaxHistory
from megatron_lowbit.recipes import OPERANDS, Layer, load_recipe, shipped_recipes

CPU = torch.device("cpu")
TOKENS = [20, 0, 7, 33]
MIDDLE = Layer("decoder.layers.4.mlp.experts.local_experts.0.linear_fc1", 4, 10)
QUANTIZING = [
    name
    for name in shipped_recipes()
    if (precision := load_recipe(name).precision_for(MIDDLE)).quantized
    and not precision.shares_operands  # those are a linear layer for each expert
]


class CountingEngine(ReferenceEngine):
    """Counts how often matrices are quantized together."""

    def __init__(self) -> None:
        super().__init__("tests")
        self.together = 0

    def quantize_all(self, *arguments):
        self.together += 1
        return super().quantize_all(*arguments)


def contexts_of(recipe: str, **options) -> list[LinearContext]:
    precision = load_recipe(recipe).precision_for(MIDDLE)
    engine, length = CountingEngine(), precision.history_length
    return [
        LinearContext(
            precision, engine, key=expert,
            amax_history=AmaxHistory(len(OPERANDS), length, CPU) if length else None, **options,
        )
        for expert in range(len(TOKENS))
    ]  # fmt: skip


def group_of(contexts: list[LinearContext]) -> GroupContext | list[LinearContext]:
    """Return the experts' context together, where their precision can be computed so."""
    if not can_group(contexts[0]):
        return contexts
    return GroupContext(contexts[0], [context.key for context in contexts])


def draws() -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(sum(TOKENS), 64, generator=generator, requires_grad=True)
    weights = [torch.randn(48, 64, generator=generator, requires_grad=True) for _ in TOKENS]
    return x, weights


def one_by_one(x, weights, contexts) -> torch.Tensor:
    calls = zip(x.split(TOKENS), weights, contexts, strict=True)
    return torch.cat([lowbit_linear(*call) for call in calls if len(call[0])])


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_the_bits_of_a_layer_for_each(recipe):
    contexts = contexts_of(recipe)
    (x, weights), (other, others) = draws(), draws()
    y = lowbit_grouped_linear(x, weights, group_of(contexts), TOKENS, [None] * len(TOKENS))
    expected = one_by_one(other, others, contexts_of(recipe))
    assert torch.equal(y, expected)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(x.grad, other.grad)
    for weight, count, same in zip(weights, TOKENS, others, strict=True):
        if count or weight.grad is not None:
            assert torch.equal(weight.grad, same.grad) if count else not weight.grad.any()
    precision = contexts[0].precision
    # Amaxes are recorded one by one, and values of fprop dequantized one by one.
    alone = precision.history_length > 0 or precision.dgrad.rhs_of_fprop
    assert bool(contexts[0].engine.together) is not alone


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("tokens", [[24, 0, 7, 33], [0, 64, 0, 0]], ids=str)
def test_experts_in_bf16_are_multiplied_together(tokens, added, monkeypatch):
    """Three launches, whose sums are those of float64 but for FP32's and BF16's rounding."""
    launches, multiply = [], fused.multiply_groups
    monkeypatch.setattr(
        fused, "multiply_groups", lambda *pair: launches.append(pair) or multiply(*pair)
    )
    precision = load_recipe("bf16").precision_for(MIDDLE)
    context = LinearContext(precision, fused.FusedEngine((9, 0)), 0, accumulate_main_grad=added)
    (x, weights), device = draws(), "cuda" if torch.cuda.is_available() else "cpu"
    x, *weights = (
        t.detach().to(device, torch.bfloat16).requires_grad_() for t in (x[:64], *weights)
    )
    x = torch.cat([x, x])[:64].detach().requires_grad_()
    for weight in weights if added else ():
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    y = lowbit_grouped_linear(x, weights, GroupContext(context), tokens, [None] * len(tokens))
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y)
    y.backward(grad)
    assert len(launches) == 3 and y.dtype is x.grad.dtype is torch.bfloat16
    parts = (tensor.double().split(tokens) for tensor in (x.detach(), grad, y.detach(), x.grad))
    for a, dy, product, dx, weight in zip(*parts, weights, strict=True):
        w = weight.detach().double()
        dw = weight.main_grad.double() - 1 if added else weight.grad.double()
        for found, left, right in ((product, a, w.t()), (dx, dy, w), (dw, dy.t(), a)):
            exact, most = left @ right, left.abs() @ right.abs()
            # Triton's interpreter cuts BF16 off.
            rounding = (
                2.0**-20 * (1 + exact.abs()) if found is dw and added else 2.0**-7 * exact.abs()
            )
            assert ((found - exact).abs() <= 2.0**-18 * most + rounding).all()


@pytest.mark.parametrize("recipe", ["fp8-tile", "nvfp4", "mxfp4-backward"])
def test_a_rank_without_tokens(recipe):
    x, weights = draws()
    x = x[:0].detach().requires_grad_()
    nothing = [None] * len(TOKENS)
    y = lowbit_grouped_linear(x, weights, group_of(contexts_of(recipe)), [0] * len(TOKENS), nothing)
    y.sum().backward()
    assert y.shape == (0, 48) and x.grad.shape == (0, 64)
    assert all(torch.equal(weight.grad, torch.zeros_like(weight)) for weight in weights)


def test_weights_are_quantized_once_a_step():
    cache = WeightCache()
    group = group_of(contexts_of("nvfp4"))
    group = replace(group, context=replace(group.context, weight_cache=cache))
    x, weights = draws()
    nothing = [None] * len(TOKENS)
    lowbit_grouped_linear(x, weights, group, TOKENS, nothing)
    kept, together = cache.operands, group.context.engine.together
    assert [len(operands) for operands in kept] == [len(TOKENS)] * 2
    lowbit_grouped_linear(x, weights, group, [5, 5, 25, 25], nothing)
    assert cache.operands is kept
    assert group.context.engine.together == together + 1  # the tokens


def test_an_evaluation_leaves_no_state_behind():
    cache = WeightCache()
    group = group_of(contexts_of("nvfp4"))
    group = replace(group, context=replace(group.context, weight_cache=cache))
    x, weights = draws()
    with torch.no_grad():
        lowbit_grouped_linear(x, weights, group, TOKENS, [None] * len(TOKENS))
    assert cache.operands is None


@pytest.mark.parametrize("are_first", [False, True])
def test_gradients_are_added_to_main_gradients(are_first):
    """The first microbatch writes its gradients, and zeros for an expert without tokens."""
    group = group_of(contexts_of("fp8-tile", accumulate_main_grad=True))
    (x, weights), (other, others) = draws(), draws()
    for weight in weights:
        weight.main_grad = torch.ones_like(weight)
        weight.grad_added_to_main_grad = not are_first
    lowbit_grouped_linear(x, weights, group, TOKENS, [None] * len(TOKENS)).sum().backward()
    one_by_one(other, others, contexts_of("fp8-tile")).sum().backward()
    for weight, same in zip(weights, others, strict=True):
        assert weight.grad_added_to_main_grad
        added = torch.zeros_like(weight) if same.grad is None else same.grad
        assert torch.equal(weight.main_grad, added if are_first else 1 + added)
    # Autograd has copied none of the tensors that stand for the gradients.
    assert len({weight.grad.data_ptr() for weight in weights}) == 1


@pytest.mark.parametrize("mixed", ["high precision", "another recipe", "bias"])
def test_experts_that_differ_are_called_one_by_one(mixed):
    contexts, biases = contexts_of("fp8-tile"), [None] * len(TOKENS)
    if mixed == "bias":
        biases[0] = torch.ones(48)
    else:
        contexts[0] = None if mixed == "high precision" else contexts_of("nvfp4")[0]
    x, weights = draws()
    y = lowbit_grouped_linear(x, weights, contexts, TOKENS, biases)
    for part, own, weight, context, bias in zip(
        x.split(TOKENS), y.split(TOKENS), weights, contexts, biases, strict=True
    ):
        if context is None:
            assert torch.equal(own, part @ weight.t())
        elif len(part):
            assert torch.equal(own, lowbit_linear(part, weight, context, bias))


def test_autocast_has_no_effect():
    """Backward is inside as well: it would round what its FP32 GEMMs multiply."""
    x, weights = draws()
    grad = torch.randn(len(x), 48, generator=torch.Generator().manual_seed(6))

    def run():
        contexts = group_of(contexts_of("nvfp4"))
        y = lowbit_grouped_linear(x, weights, contexts, TOKENS, [None] * len(TOKENS))
        return y.detach(), *torch.autograd.grad(y, [x, *weights], grad)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        for one, other in zip(run(), expected, strict=True):
            assert torch.equal(one, other)
