"""Experts quantized together: the bits of a linear layer for each."""

from dataclasses import replace

import pytest
import torch

from megatron_lowbit.kernels import fused
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import (
    DeviceCounts,
    GroupContext,
    LinearContext,
    Shards,
    WeightCache,
    counts_on_device,
    grouped,
    lowbit_grouped_linear,
    lowbit_linear,
)
from megatron_lowbit.layers.counts import Permutation
from megatron_lowbit.layers.grouped import can_group
from megatron_lowbit.numerics import AmaxHistory
from megatron_lowbit.recipes import OPERANDS, Layer, load_recipe, shipped_recipes
from tests.marks import others_slow

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
    """Three launches, whose sums equal float64 up to FP32's and BF16's rounding."""
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


class Unread(torch.Tensor):
    """A tensor whose numbers the host must not ask for."""

    def _refuse(self, *_):
        raise AssertionError("the host waits for the device")

    tolist = item = cpu = numpy = __int__ = __bool__ = __index__ = __float__ = _refuse


class Counts(DeviceCounts):
    """Numbers of tokens as a dispatcher leaves them on the device."""

    def __init__(self, counts: list[int], device: str, permutation=None) -> None:
        numbers = torch.tensor(counts, device=device).as_subclass(Unread)
        super().__init__(numbers, sum(counts), permutation)
        self.reads, self._counts = 0, counts

    def on_host(self) -> list[int]:
        self.reads += 1
        return self._counts


def passes(recipe: str, counts: list[int], tokens, rows=None, training=True) -> list[torch.Tensor]:
    """Return a layer's result and, in training, gradients, of 64 to 48 features, by kernels.

    ``rows``: function that makes the layer's input from 50 tokens; None for rows of their own.
    """
    context = LinearContext(
        load_recipe(recipe).precision_for(MIDDLE), fused.FusedEngine((9, 0)), 3,
        accumulate_main_grad=True,
    )  # fmt: skip
    generator, total = torch.Generator().manual_seed(7), sum(counts)
    x, grad, *weights = (
        torch.randn(*size, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
        for size in ((50 if rows else total, 64), (total, 48), *[(48, 64)] * len(counts))
    )
    for weight in weights:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    group, biases = GroupContext(context, range(len(counts))), [None] * len(counts)
    with torch.set_grad_enabled(training):
        y = lowbit_grouped_linear(rows(x) if rows else x, weights, group, tokens, biases)
    if not training:
        return [y]
    y.backward(grad)
    return [y, x.grad, *(weight.main_grad for weight in weights)]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_DEVICE = ["bf16", "fp8-tile", "mxfp8", "nvfp4"]
OTHERS_ON_DEVICE = [
    "fp8-tensorwise", "mxfp4", "mxfp4-backward", "nemotron3-super", "nvfp4-4over6",
    "nvfp4-4over6-te", "nvfp4-fold", "nvfp4-late-bf16", "nvfp4-ue5m3",
]  # fmt: skip


@pytest.mark.parametrize(
    "counts", others_slow([(20, 0, 7, 37), (130,), (0, 64, 0)], [(20, 0, 7, 37)]), ids=str
)
@pytest.mark.parametrize("recipe", others_slow([*ON_DEVICE, *OTHERS_ON_DEVICE], ["bf16"]))
def test_numbers_of_tokens_that_stay_on_the_device(recipe, counts):
    """The bits equal counts that the host knows, and it never reads them."""
    tokens = Counts([*counts], DEVICE)
    made, known = (passes(recipe, counts, one) for one in (tokens, counts))
    assert not tokens.reads
    torch.testing.assert_close(made, known, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", others_slow([*ON_DEVICE, "mxfp4-backward"], ["fp8-tile"]))
def test_tokens_that_are_quantized_in_the_order_of_experts(recipe, monkeypatch):
    """The bits equal those from permuted tokens; only products in BF16 make a copy of these."""
    copies, permute = [], grouped.permuted
    monkeypatch.setattr(
        grouped, "permuted", lambda x, tokens: copies.append(x) or permute(x, tokens)
    )
    counts, draws = [20, 0, 7, 37], torch.Generator().manual_seed(3)
    order = torch.randint(50, (sum(counts),), generator=draws, dtype=torch.int32).to(DEVICE)

    def sum_by_token(grad):  # in FP64, where sums of BF16 gradients are exact in any order
        sums = torch.zeros(50, 64, dtype=torch.float64, device=DEVICE)
        return sums.index_add(0, order, grad.double()).to(grad.dtype)

    tokens = Counts(counts, DEVICE, Permutation(order, sum_by_token))
    made = passes(recipe, counts, tokens, lambda x: x)
    assert len(copies) == (recipe in ("bf16", "mxfp4-backward")) and not tokens.reads
    permuted = lambda x: x.double().index_select(0, order).to(x.dtype)  # noqa: E731
    known = passes(recipe, counts, Counts(counts, DEVICE), permuted)
    torch.testing.assert_close(made, known, rtol=0, atol=0)
    # An evaluation makes no transposes of gathered tokens, whose numbers it would have to read.
    [evaluated] = passes(recipe, counts, tokens, lambda x: x, training=False)
    assert torch.equal(evaluated, known[0]) and not tokens.reads


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_which_recipes_need_no_numbers_on_the_host(recipe):
    """Others make an operand from another or share a scale, or have no grouped launch."""
    precision = load_recipe(recipe).precision_for(MIDDLE)
    context = LinearContext(precision, fused.FusedEngine((9, 0)), 0)
    weights = [torch.empty(48, 64, dtype=torch.bfloat16)] * 4
    stays = can_group(context) and counts_on_device(context, weights, 64)
    assert stays == (recipe in [*ON_DEVICE, *OTHERS_ON_DEVICE])


def test_what_needs_numbers_on_the_host():
    context = LinearContext(
        load_recipe("mxfp8").precision_for(MIDDLE), fused.FusedEngine((9, 0)), 0
    )
    weights = [torch.empty(48, 64, dtype=torch.bfloat16)] * 4
    assert counts_on_device(context, weights, 64)
    split = Shards(roles=frozenset({"weight"}))
    for other in (
        replace(context, engine=ReferenceEngine("tests")),
        replace(context, engine=fused.FusedEngine((10, 0))),
        replace(context, shards=split),
    ):
        assert not counts_on_device(other, weights, 64)
    for matrices, rows in (
        ([w.float() for w in weights], 64),
        ([w[:40] for w in weights], 64),
        (weights * 65, 64),
        (weights, 0),
        (weights, 2**36),
    ):
        assert not counts_on_device(context, matrices, rows)


def test_numbers_on_the_device_that_the_host_needs():
    """The reference engine and experts one by one ask for them."""
    contexts = contexts_of("fp8-tile")
    (x, weights), nothing = draws(), [None] * len(TOKENS)
    expected = lowbit_grouped_linear(x, weights, contexts, TOKENS, nothing)
    for group in (group_of(contexts), contexts):
        tokens = Counts(TOKENS, "cpu")
        assert torch.equal(lowbit_grouped_linear(x, weights, group, tokens, nothing), expected)
        assert tokens.reads == 1
        order = torch.arange(len(x), dtype=torch.int32).flip(0)
        tokens = Counts(
            TOKENS, "cpu", Permutation(order, lambda grad: torch.cat([grad.flip(0)] * 2))
        )
        other = torch.cat([x.flip(0)] * 2).detach().requires_grad_()
        y = lowbit_grouped_linear(other, weights, group, tokens, nothing)
        assert torch.equal(y, expected)
        y.sum().backward()
        by_row = torch.autograd.grad(expected.sum(), x, retain_graph=True)[0]
        assert torch.equal(other.grad, torch.cat([by_row.flip(0)] * 2))


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
        torch.testing.assert_close(run(), expected, rtol=0, atol=0)
