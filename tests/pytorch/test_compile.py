"""torch.compile of converted models without graph breaks: the eager bits and draws."""

import copy
import pickle

import pytest
import torch
from block_model import Model, batch, build, loss_of
from torch import Tensor, nn

from megatron_lowbit import LowbitLinear, convert
from megatron_lowbit.errors import UserError
from megatron_lowbit.layers import compiled
from megatron_lowbit.recipes import LinearPrecision, load_precision, load_recipe, shipped_recipes
from tests.marks import others_slow

CASES = {
    f"{name}-{config}": precision
    for name in shipped_recipes()
    for config, precision in load_recipe(name).configs.items()
    if precision.quantized and not precision.history_length
}


def model_in(precision: LinearPrecision, recomputes: bool = False) -> Model:
    """Return the model with a precision in each layer of its blocks."""
    model = convert(build(blocks=2), "mxfp8")
    for module in model.modules():
        if isinstance(module, LowbitLinear):
            module.set_precision(precision, "bf16")
    model.reentrant = False if recomputes else None
    return model


def train(model: Model, call, autocast: bool = False) -> list[Tensor]:
    """Return two losses, all gradients, and outputs without gradients and in evaluation."""
    torch.manual_seed(5)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = [loss_of(call, batch(number)) for number in range(2)]
    sum(losses).backward()
    with torch.no_grad():
        outputs = [call(batch(2)), call.eval()(batch(2))]
    call.train()
    return [*losses, *outputs, *(parameter.grad.clone() for parameter in model.parameters())]


def check(model: Model, autocast: bool = False) -> None:
    """Compare with eager mode; the backend leaves the arithmetic of other modules as it is.

    Under autocast it does not: the last gradient, of the head, differs in a plain model, too. The
    compiled model runs first: what eager mode caches in a precision is not there to be traced.
    """
    torch._dynamo.reset()
    results = train(model, torch.compile(model, fullgraph=True, backend="aot_eager"), autocast)
    expected = train(model, model, autocast)
    count = len(expected) - autocast
    torch.testing.assert_close(results[:count], expected[:count], rtol=0, atol=0)


@pytest.mark.parametrize("name", others_slow(["mxfp8", "qat", "fp8-row", "averis"], ["qat"]))
def test_eager_bits(name, reference):
    """Scales of blocks, values of fprop in dgrad, no transpose of codes, split means and draws."""
    check(model_in(load_precision(name)))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_eager_bits_of_all_recipes(case):
    check(model_in(CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_eager_draws_where_activations_are_computed_again(autocast, reference):
    check(model_in(load_precision("nvfp4"), recomputes=True), autocast)


class Attention(nn.Module):
    """Layers that take one input, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        precision = load_precision("nvfp4")
        self.q, self.k, self.v = (LowbitLinear(64, 64, precision=precision) for _ in range(3))

    def forward(self, x):
        return self.v(x) * self.k(x) + self.q(x) + self.k(x)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_layers_of_one_input_draw_keys_of_their_own(backend, reference):
    """A compiler makes one of equal calls."""
    torch._dynamo.reset()
    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(32, 64)
    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend=backend)):
        torch.manual_seed(5)
        y = call(x)
        grads = torch.autograd.grad(y.square().sum(), list(model.parameters()))
        results.append([y, *grads, torch.get_rng_state()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_takes_evaluation_in_high_precision_only(strict, reference):
    """A number of a precision means another one in the process that loads the program."""
    layer, x = LowbitLinear(64, 64, precision="mxfp8"), torch.randn(32, 64)
    layer(x)
    with pytest.raises(
        (UserError, torch._dynamo.exc.Unsupported), match="does not contain the rec"
    ):
        torch.export.export(layer, (x,), strict=strict)
    program = torch.export.export(layer.eval(), (x,), strict=strict)
    assert torch.equal(program.module()(x), layer(x))


@pytest.mark.slow
def test_the_default_backend_and_engine():
    """Inductor's LayerNorm may differ in last bits, by which an input rounds to another E4M3 code.

    A code's step is 1/8 of it at most; of the 64 terms of a sum few change.
    """
    torch._dynamo.reset()
    model = convert(build(), "fp8-tile")
    expected = train(model, model)
    got = train(model, torch.compile(model, fullgraph=True))
    torch.testing.assert_close(got[0], expected[0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_batches_of_other_sizes_and_frozen_parameters(frozen, reference):
    """Rows that are a view, and gradients that are expanded; without rows nothing is quantized."""
    torch._dynamo.reset()
    layer = LowbitLinear(64, 96, precision="mxfp8")
    if frozen is not None:
        getattr(layer, frozen).requires_grad_(False)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (16, 48, 1, 0):
        results = []
        for function in (layer, call):
            layer.zero_grad()
            columns = torch.ones(64, rows, requires_grad=frozen is None)
            y = function(columns.t())
            y.sum().backward()
            grads = [tensor.grad for tensor in (columns, *layer.parameters())]
            results.append([y.detach(), *(grad for grad in grads if grad is not None)])
        torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.slow
def test_a_weight_shares_its_scale(reference):
    """The operator takes the other weights, without a gradient for them."""
    model = model_in(load_precision("fp8-tensorwise"))
    model.layers[0].up.scaled_with = (model.layers[1].up,)
    check(model)


def test_a_layer_that_is_unpickled_has_the_number_of_its_precision(monkeypatch):
    layer = LowbitLinear(64, 64, precision="mxfp8")
    pickled, copied = pickle.dumps(layer), copy.deepcopy(layer)
    assert copied.number == layer.number
    other = load_precision("fp8-row")
    monkeypatch.setattr(compiled, "_PRECISIONS", [other])
    assert pickle.loads(pickled).number == 1
    assert [other, layer.precision] == compiled._PRECISIONS


def test_where_the_cpu_runtime_replaces_functions_of_torch(reference):
    """The last test of the file: what the import replaces stays replaced in the process."""
    import megatron_lowbit.megatron  # noqa: F401

    check(model_in(load_precision("averis")))
