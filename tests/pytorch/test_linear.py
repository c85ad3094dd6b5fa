"""LowbitLinear: the bits of a recipe, nn.Linear's state, and random bits that can be repeated."""

import copy
import pickle

import pytest
import torch
from block_model import batch, build, loss_of
from torch import nn

from megatron_lowbit import LowbitLinear, convert, load_recipe, lowbit_linear, quantize
from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import LinearContext

FP8 = load_recipe("fp8-tile").configs["fp8"]
NVFP4 = load_recipe("nvfp4").configs["nvfp4"]
EVERYWHERE = load_recipe("nvfp4", ["bf16_blocks=none"])
pytestmark = pytest.mark.usefixtures("reference")


def layer(precision=NVFP4, **options) -> LowbitLinear:
    torch.manual_seed(0)
    return LowbitLinear(64, 48, precision=precision, **options)


def operands():
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, 16, n, generator=generator) for n in (64, 48))
    return x.requires_grad_(), dy


def test_forward_multiplies_quantized_operands():
    module, (x, _) = layer(FP8), operands()
    left = quantize(x.detach().flatten(0, 1), "fp8-1x128-e4m3", scale_format="pow2").dequantize()
    right = quantize(module.weight.detach(), "fp8-128x128-e4m3", scale_format="pow2").dequantize()
    expected = (left @ right.t() + module.bias).view(2, 16, 48)
    assert torch.equal(module(x), expected)


def test_a_key_of_the_generator_decides_all_bits():
    module, (x, dy) = layer(), operands()
    torch.manual_seed(7)
    key = int(torch.randint(2**63 - 1, ()))
    context = LinearContext(NVFP4, ReferenceEngine("tests"), key)
    y = lowbit_linear(x, module.weight, context, module.bias)
    expected = torch.autograd.grad(y, [x, *module.parameters()], dy)
    torch.manual_seed(7)
    result = module(x)
    assert torch.equal(result, y)
    for got, right in zip(
        torch.autograd.grad(result, [x, *module.parameters()], dy), expected, strict=True
    ):
        assert torch.equal(got, right)
    again = torch.autograd.grad(module(x), [module.weight], dy)[0]
    assert not torch.equal(again, expected[1]), "a second call draws the first one's bits"


def test_what_rounds_to_nearest_draws_nothing():
    before = torch.get_rng_state()
    module, (x, _) = layer(FP8), operands()
    torch.set_rng_state(before)
    module(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_with_one_seed_draw_different_bits(monkeypatch):
    module, (x, dy) = layer(), operands()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    gradients = []
    for rank in (0, 1, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(7)
        gradients.append(torch.autograd.grad(module(x), module.weight, dy)[0])
    assert torch.equal(gradients[0], gradients[2])
    assert not torch.equal(gradients[0], gradients[1])


def test_state_dicts_are_interchangeable():
    plain, module = nn.Linear(64, 48), layer()
    assert list(module.state_dict()) == list(plain.state_dict())
    assert module.state_dict()._metadata == plain.state_dict()._metadata
    plain.load_state_dict(module.state_dict())
    other = LowbitLinear(64, 48, precision=FP8)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.weight, module.weight) and torch.equal(other.bias, module.bias)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied):
    module, (x, _) = layer(), operands()
    other = copied(module)
    assert other.precision == NVFP4
    assert torch.equal(other(x), module(x))


def test_evaluation_is_in_high_precision_unless_asked_for():
    x, _ = operands()
    module = layer(FP8).eval()
    plain = nn.functional.linear(x, module.weight, module.bias)
    assert torch.equal(module(x), plain)
    module.eval_precision = "recipe"
    quantized = module(x)
    assert not torch.equal(quantized, plain)
    assert torch.equal(quantized, module.train()(x))


def test_evaluation_of_a_fused_encoder_layer(monkeypatch):
    """Without gradients, torch computes the layer in one kernel from the weights."""
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 8, 64)
    with pytest.raises(UserError, match=r"eval_precision='recipe': .*set_fastpath_enabled"):
        convert(model, "mxfp8", eval_precision="recipe")
    other = nn.TransformerEncoderLayer(64, 4, 64)  # batch_first=False, which the kernel lacks
    others = nn.TransformerEncoder(other, 2, enable_nested_tensor=False)
    with pytest.warns(UserWarning, match="MultiheadAttention"):
        convert(others, "mxfp8", eval_precision="recipe")
    monkeypatch.setattr("torch.backends.mha._is_fastpath_enabled", False)
    with pytest.warns(UserWarning, match="MultiheadAttention"):
        convert(model, "mxfp8", eval_precision="recipe").eval()
    expected = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_no_tokens():
    module = layer()
    y = module(torch.empty(0, 64, requires_grad=True))
    y.sum().backward()
    assert y.shape == (0, 48) and not module.weight.grad.any()


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("recipe", ["fp8-tile", "nvfp4", "mxfp4-backward"])
def test_autocast_is_bf16_parameters(recipe, backward_inside):
    """Autocast casts operands, as for nn.Linear, and leaves the arithmetic alone."""
    precision = next(c for c in load_recipe(recipe).configs.values() if c.quantized)
    module, (x, dy) = layer(precision), operands()
    half = copy.deepcopy(module).bfloat16()
    x_half = x.detach().bfloat16().requires_grad_()
    torch.manual_seed(7)
    expected = half(x_half)
    expected.backward(dy.bfloat16())
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        if backward_inside:
            y.backward(dy.bfloat16())
    if not backward_inside:
        y.backward(dy.bfloat16())
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    assert module.weight.grad.dtype == torch.float32
    for got, right in ((x, x_half), (module.weight, half.weight), (module.bias, half.bias)):
        assert torch.equal(got.grad, right.grad.float())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_bits(reentrant):
    gradients = []
    for kind in (None, reentrant):
        model = convert(build(dropout=0.2), EVERYWHERE)
        model.reentrant = kind
        torch.manual_seed(3)
        loss = loss_of(model, batch(0))
        loss.backward()
        gradients.append([loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant, kept", [(None, 8 * 2), (True, 0)])
def test_operands_are_kept_until_backward_unless_recomputed(reentrant, kept):
    """The codes of eight layers' inputs and weights."""
    model, saved = convert(build(), "fp8-tile"), []
    model.reentrant = reentrant

    def pack(tensor):
        saved.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, batch(0))
    assert saved.count(torch.float8_e4m3fn) == kept


def train(model, optimizer, numbers) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = loss_of(model, batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def start():
    model = convert(build(), EVERYWHERE)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def test_a_run_is_repeated_by_its_seed_and_resumed_by_the_generators_state():
    """Without dropout, the generator serves stochastic rounding alone."""
    run = start()
    torch.manual_seed(1)
    whole = train(*run, range(8))
    run = start()
    torch.manual_seed(1)
    assert train(*run, range(5)) == whole[:5]
    saved = copy.deepcopy([run[0].state_dict(), run[1].state_dict(), torch.get_rng_state()])

    def resumed(generator_state):
        model, optimizer = start()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        torch.set_rng_state(generator_state)
        return train(model, optimizer, range(5, 8))

    assert resumed(saved[2]) == whole[5:]
    assert resumed(torch.manual_seed(99).get_state()) != whole[5:]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(UserError, match=str(dtype)):
        layer(dtype=dtype)(torch.randn(4, 64, dtype=dtype))
    with pytest.raises(UserError, match=f"input {dtype}, weight torch.float32"):
        layer()(torch.randn(4, 64, dtype=dtype))


@pytest.mark.parametrize("of_bias", [torch.float32, torch.bfloat16])
def test_a_bias_of_another_dtype_is_refused(of_bias):
    """As by nn.Linear, in either direction."""
    (dtype,) = {torch.float32, torch.bfloat16} - {of_bias}
    module = layer(dtype=dtype)
    module.bias = nn.Parameter(module.bias.to(of_bias))
    with pytest.raises(UserError, match=f"weight {dtype}, bias {of_bias}; all must be"):
        module(torch.randn(4, 64, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (63,), (4, 1)])
def test_inputs_without_the_features_are_refused(shape):
    with pytest.raises(UserError, match=r"input .*, weight \(48, 64\); they must be"):
        layer()(torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.complex64, torch.bfloat16])
def test_the_function_refuses_other_dtypes(dtype):
    """It would cut off integers and imaginary parts."""
    of_weight = torch.float32 if dtype is torch.bfloat16 else dtype
    x, weight = torch.ones(4, 64, dtype=dtype), torch.ones(32, 64, dtype=of_weight)
    with pytest.raises(UserError, match=f"input {dtype}, weight {of_weight}, bias None; all must"):
        lowbit_linear(x, weight, "mxfp8")
    with pytest.raises(UserError, match=r"input \(4, 64\), weight \(64,\); they must be"):
        lowbit_linear(torch.ones(4, 64), torch.ones(64), "mxfp8")


def test_a_weight_that_is_no_plain_tensor_is_refused():
    class Packed(torch.Tensor):
        pass

    module = layer()
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Packed))
    with pytest.raises(UserError, match="the weight is a Packed"):
        module(torch.randn(4, 64))


def test_a_cuda_graph_is_refused_where_it_would_repeat_random_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x, _ = operands()
    with pytest.raises(UserError, match="without CUDA graphs"):
        layer(NVFP4)(x)
    layer(FP8)(x)


def test_delayed_scaling_is_refused():
    with pytest.raises(UserError, match="amax_history"):
        LowbitLinear(64, 48, precision=load_recipe("fp8-delayed").configs["fp8"])


def test_the_precision_is_printed():
    assert "dgrad=(nvfp4 SR x nvfp4-2d)" in repr(layer())
