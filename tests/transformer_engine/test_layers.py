"""Transformer Engine's layers computed by this project, on stand-ins for its modules."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import lowbit_linear
from megatron_lowbit.megatron.features.quantized_parameters import QuantizedParameters
from megatron_lowbit.megatron.features.stored_bucket import StoredBucket
from megatron_lowbit.megatron.layers import state as layer_state
from megatron_lowbit.megatron.layers.state import LayerPlan, weights_of
from megatron_lowbit.recipes import Layer, load_recipe
from megatron_lowbit.transformer_engine.native import misfits
from tests.transformer_engine.stand_in import (
    ColumnLinear,
    Linear,
    NormColumnLinear,
    RowLinear,
    use_stand_ins,
)

SHAPE = (96, 64)
PATH = "decoder.layers.4.mlp.linear_fc1"


@pytest.fixture
def layers(monkeypatch):
    monkeypatch.setattr(layer_state, "microbatch_key", lambda is_expert: 7)
    return use_stand_ins(monkeypatch)


def taken_over(
    layers,
    recipe: str,
    kind: type = Linear,
    evaluates: bool = False,
    path: str = PATH,
    saves_input: bool = False,
    accumulates: bool = False,
    options: dict | None = None,
    parallel: dict | None = None,
    **config,
) -> torch.nn.Module:
    torch.manual_seed(0)
    module, layer = kind(*SHAPE[::-1], **(options or {})), Layer(path, 4, 10)
    vars(module.config).update(config)
    vars(module).update(parallel or {})
    if saves_input:
        module.save_original_input = True
    precision = load_recipe(recipe).precision_for(layer)
    plan = LayerPlan(layer, precision, ReferenceEngine("tests"), accumulates, None, evaluates)
    layers.take_over(module, plan)
    return module


class Stored:
    """A module whose weight lies in a bucket of one rank, which is freed after it is stored."""

    def __init__(self, module: torch.nn.Module) -> None:
        (self.weight, self.state), *_ = weights_of(module)
        data = self.weight.detach().clone().view(-1)
        self.weight.data, self.weight.main_param = data.view(SHAPE), data.float()
        bucket = SimpleNamespace(param_data=data, param_to_index={self.weight: (0, data.numel())})
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        self.bucket = StoredBucket(bucket, group, {self.weight: self.state.weight_context()})

    def update(self, value: torch.Tensor) -> None:
        """Let the optimizer write a value, store it, free the memory, and begin a step."""
        storage = self.bucket.data.untyped_storage()
        storage.resize_(self.bucket.data.nbytes)
        self.bucket.data.copy_(value.view(-1))
        with torch.no_grad():
            self.bucket.sync()
        storage.resize_(0)
        self.state.forget_weight()


def passes(module: torch.nn.Module, count: int = 2) -> list[torch.Tensor]:
    """Return products and gradients of microbatches, forward passes before backward passes."""
    draws = torch.Generator().manual_seed(1)
    xs = [torch.randn(32, SHAPE[1], generator=draws).bfloat16() for _ in range(count)]
    ys = [module(x.requires_grad_())[0] for x in xs]
    for y in ys:
        y.backward(torch.randn(y.shape, generator=draws).bfloat16())
    found = [*(y.detach() for y in ys), *(x.grad for x in xs), module.weight.grad]
    module.weight.grad = None
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", ["fp8-tile", "nvfp4", "mxfp8", "mxfp4"])
@pytest.mark.parametrize(
    ("kind", "saves_input"), [(Linear, False), (Linear, True), (NormColumnLinear, False)]
)
def test_products_are_those_of_the_whole_weight(layers, recipe, kind, saves_input):
    plain, module = (taken_over(layers, recipe, kind, saves_input=saves_input) for _ in range(2))
    stored, before = Stored(module), None
    for step in range(2):
        value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).bfloat16()
        plain.weight.data.copy_(value)
        plain.layer_state.forget_weight()
        stored.update(value)
        assert module.weight.untyped_storage().size() == 0
        found = passes(module)
        assert same(found, passes(plain))
        assert before is None or not same(found, before)
        before = found


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.parametrize(
    "recipe", ["fp8-tile", "fp8-delayed", "nvfp4", "qat-nvfp4", "mxfp4-backward"]
)
def test_attentions_output_is_quantized_again_for_wgrad(layers, recipe):
    """Not where attention itself is recomputed. The bits are the same."""
    made = [
        taken_over(layers, recipe, path="decoder.layers.4.self_attention.linear_proj", **config)
        for config in ({}, RECOMPUTED, {"attention_output_gate": True})
    ]
    assert [module.save_original_input for module in made] == [True, False, False]
    again, kept, _ = made
    assert same(passes(again), passes(kept))
    if recipe == "fp8-delayed":
        recorded = [module.layer_state.amax_history for module in (again, kept)]
        assert torch.equal(*(history.step for history in recorded)) and recorded[0].step.any()


def test_gradients_go_to_main_grad(layers):
    """As without stored weights, where the module adds wgrad to it."""
    found = []
    for stores in (False, True):
        module = taken_over(layers, "nvfp4", accumulates=True)
        module.weight.main_grad = torch.ones(SHAPE)
        if stores:
            Stored(module).update(module.weight.detach().clone())
        passes(module)
        found.append(module.weight.main_grad)
    assert torch.equal(*found) and (found[0] != 1).any()


def test_captured_layers_in_bf16_add_the_gradients_of_all_microbatches(layers, monkeypatch):
    """A graph repeats what it captured: a gradient that is written replaces the others."""
    found = []
    for captures in (False, True):
        monkeypatch.setattr(layers, "is_graph_capturing", lambda: captures)  # noqa: B023
        module = taken_over(layers, "bf16")
        module.weight.main_grad = torch.zeros(SHAPE)
        passes(module)
        found.append(module.weight.main_grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(1804, 384), (1808, 384), (1808, 376)])
def test_transformer_engine_computes_shapes_that_it_can_multiply(layers, shape):
    """Its assertion about 1804 x 384, of a hybrid of 20M parameters, ended the first step."""
    module = Linear(*shape[::-1])
    layer = Layer(PATH, 4, 10)
    precision = load_recipe("fp8-tile-e4m3").precision_for(layer)
    plan = LayerPlan(layer, precision, ReferenceEngine("tests"), False, None, False)
    state = layers.take_over(module, plan)
    fits = shape == (1808, 384)
    assert (state.native is not None) == fits and state.quantizes_weight != fits
    assert misfits([(shape, precision)], (9, 0)) == (set() if fits else {shape})


@pytest.mark.parametrize("native", [None, "a recipe of Transformer Engine"])
def test_modules_that_quantize_their_weight_are_told_that_it_changed(layers, native):
    module = taken_over(layers, "bf16")
    module.layer_state.native, module.is_first_microbatch = native, False
    module.layer_state.forget_weight()
    assert module.is_first_microbatch == (native is not None)


@pytest.mark.parametrize("kind", [Linear, ColumnLinear, RowLinear])
@pytest.mark.parametrize("returns_bias", [False, True])
def test_biases_are_added_or_returned(layers, kind, returns_bias):
    module = taken_over(
        layers, "fp8-tile", kind, options={"bias": True, "returns_bias": returns_bias}
    )
    x = torch.randn(32, SHAPE[1]).bfloat16()
    y, bias = module(x)
    context = module.layer_state.context(module.layer_state.shards())
    added = None if returns_bias else module.bias
    assert torch.equal(y, lowbit_linear(x, module.weight, context, added))
    assert bias is (module.bias if returns_bias else None)


TWO_RANKS = SimpleNamespace(rank=lambda: 1, size=lambda: 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_row_parallel_layer_reduces_its_product(layers, monkeypatch, sequence_parallel):
    """Biases are added to the sum."""
    parallel = {"tp_size": 2, "tp_group": TWO_RANKS, "sequence_parallel": sequence_parallel}
    module = taken_over(layers, "nvfp4", RowLinear, options={"bias": True}, parallel=parallel)
    all_reduce, scatter = (
        f"{name}_parallel_region" for name in
        ("reduce_from_tensor_model", "reduce_scatter_to_sequence")
    )  # fmt: skip
    monkeypatch.setattr(layers, all_reduce, lambda y, group: 2 * y)
    monkeypatch.setattr(layers, scatter, lambda y, group: 3 * y[:16])
    x, state = torch.randn(32, SHAPE[1]).bfloat16(), module.layer_state
    y, _ = module(x)
    product = lowbit_linear(x, module.weight, state.context(state.shards()))
    expected = 3 * product[:16] if sequence_parallel else 2 * product
    assert torch.equal(y, expected + module.bias)
    assert state.shards().in_features.tolist() == list(range(64, 128))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_column_parallel_layer_gathers_its_input_or_reduces_dgrad(layers, sequence_parallel):
    parallel = {"tp_size": 2, "tp_group": TWO_RANKS, "sequence_parallel": sequence_parallel}
    module = taken_over(layers, "nvfp4", ColumnLinear, parallel=parallel)
    state, asked = module.layer_state, []
    shards = state.shards
    state.shards = lambda *args, **options: asked.append(shards(*args, **options)) or shards()
    module(torch.randn(32, SHAPE[1]).bfloat16())
    (one,) = asked
    assert one.sequence_parallel == sequence_parallel == (not one.allreduce_dgrad)
    assert one.group is TWO_RANKS and one.out_features.tolist() == list(range(96, 192))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_are_those_of_transformer_engine(layers, zero_centered):
    """The product takes what the norm gives, and the norm's parameters have their gradients."""
    module = taken_over(layers, "nvfp4", NormColumnLinear)
    module.zero_centered_gamma = zero_centered
    x = torch.randn(4, 8, SHAPE[1]).bfloat16().requires_grad_()
    y, _ = module(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    twin = x.detach().clone().requires_grad_()
    gain = module.layer_norm_weight.detach().clone().requires_grad_()
    inverse = (twin.float().square().mean(-1, keepdim=True) + module.eps).rsqrt()
    between = (twin.float() * inverse * (gain.float() + zero_centered)).bfloat16()
    context = module.layer_state.context(module.layer_state.shards())
    other = lowbit_linear(between, module.weight, context)
    other.backward(grad)
    assert torch.equal(y, other)
    for ours, wanted in ((x.grad, twin.grad), (module.layer_norm_weight.grad, gain.grad)):
        error = (ours.double() - wanted.double()).norm() / wanted.double().norm()
        assert error <= 2**-7  # two roundings to BF16


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"gtp_weight_remat_size": 2}, "--tensor-parallel-num-weight-shards"),
    ],
)
def test_what_only_its_own_products_have_is_refused(layers, setting, flag):
    taken_over(layers, "bf16", **setting)
    with pytest.raises(UserError, match=f"^{flag} under a recipe"):
        taken_over(layers, "nvfp4", **setting)


def test_checkpoints_hold_no_pickled_recipe(layers):
    """Transformer Engine pickles recipes of its own that a factory makes, which no load takes."""

    class Pickling(Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.ones(4, dtype=torch.uint8)

        def set_extra_state(self, state: torch.Tensor) -> None: ...

    assert taken_over(layers, "fp8-tile-e4m3", Pickling).state_dict()["_extra_state"].numel() == 0


@pytest.mark.parametrize("evaluates", [False, True])
def test_evaluations(layers, evaluates):
    """In BF16 from the whole weight; else from the codes, which training has next."""
    plain, module = (taken_over(layers, "fp8-tile", evaluates=evaluates) for _ in range(2))
    stored, x = Stored(module), torch.randn(32, SHAPE[1]).bfloat16()
    value = torch.randn(SHAPE).bfloat16()
    stored.update(value)
    plain.weight.data.copy_(value)
    if not evaluates:
        module.weight.untyped_storage().resize_(value.nbytes)
        module.weight.data.copy_(value)
    with torch.no_grad():
        assert torch.equal(module.eval()(x)[0], plain.eval()(x)[0])
    module.weight.untyped_storage().resize_(0)
    assert same(passes(module.train()), passes(plain.train()))


def test_kernels_of_transformer_engine_are_refused(layers, monkeypatch):
    def check():
        run = SimpleNamespace(states=[taken_over(layers, "nvfp4").layer_state])
        QuantizedParameters(run).check_rank()

    check()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(UserError, match=f"{PATH} .*NVFP4BlockScaling.*--transformer-impl local"):
        check()
