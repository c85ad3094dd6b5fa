"""MXNormLinear: its formulas by autograd, its bits by the quantizers, RMSNorm to the estimate."""

import pytest
import torch

from megatron_lowbit.kernels.engine import Engine, ReferenceEngine
from megatron_lowbit.layers import LinearContext, mxnorm
from megatron_lowbit.numerics import FORMATS, Quantizer
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.recipes import Layer, load_recipe

MIDDLE = Layer("decoder.layers.16.mlp.linear_fc1", 16, 32)
REFERENCE = ReferenceEngine("bits, not speed, are what is tested")


class Exact(Engine):
    """Engine that quantizes nothing, so that only the layer's own formulas are left."""

    def quantize(self, x, row, col, amaxes=(None, None)):
        return x if row else None, x.t() if col else None

    def gemm(self, lhs, rhs, bias=None, accumulation=None, out_dtype=None, folding=True):
        return torch.nn.functional.linear(lhs, rhs, bias).to(out_dtype)


EXACT = Exact("tests")


def mxnorm_linear(*tensors, engine=REFERENCE, key=0, bias=None):
    *tensors, precision, norm = (*tensors, MXNorm())[:5]
    context = LinearContext(precision, engine, key)
    return mxnorm.mxnorm_linear(*tensors, context, norm, bias)


def precision(recipe):
    return load_recipe(recipe, []).precision_for(MIDDLE)


def leaves(tokens=96, hidden=256, features=80, seed=0):
    """Return x, gain, weight, bias, and the gradient of the output."""
    draws = torch.Generator().manual_seed(seed)
    shapes = [(tokens, hidden), (hidden,), (features, hidden), (features,), (tokens, features)]
    found = [torch.randn(shape, generator=draws) for shape in shapes]
    found[1] = 1 + 0.3 * found[1]
    return [tensor.requires_grad_() for tensor in found[:-1]], found[-1]


def gradients(function, tensors, grad):
    y = function(*tensors)
    return y.detach(), *torch.autograd.grad(y, tensors, grad)


def of_layer(recipe, tensors, grad, *norm, **options):
    """Return the output, and the gradients of x, gain, weight and bias."""

    def layer(x, gain, weight, bias):
        return mxnorm_linear(x, gain, weight, precision(recipe), *norm, bias=bias, **options)

    return gradients(layer, tensors, grad)


@pytest.mark.parametrize("p", [1, 2])
def test_gradients_are_those_of_the_formulas(p):
    """Autograd sees 1 / sqrt(mean of squares), with the estimate's value."""
    tensors, grad = leaves()

    def formulas(x, gain, weight, bias):
        estimate = 1 / MXNorm(p=p).inverse_rms(x.detach().float(), 32).double()
        squares = x.square().mean(-1, keepdim=True)
        rms = (estimate.square() + squares - squares.detach()).sqrt()
        return (x / rms) @ (weight * gain).t() + bias

    exact = gradients(formulas, [t.detach().double().requires_grad_() for t in tensors],
                      grad.double())  # fmt: skip
    seen = of_layer("mxfp8", tensors, grad, MXNorm(p=p), engine=EXACT)
    for ours, theirs in zip(seen, exact, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4", "fp8-tile"])
def test_fprop_multiplies_what_the_quantizers_make(recipe):
    (x, gain, weight, _), _ = leaves()
    wanted = precision(recipe)
    with torch.no_grad():
        seen = mxnorm_linear(x, gain, weight, wanted)
        normalized = MXNorm().normalize(x, wanted.fprop.lhs.format.block)
        lhs = wanted.fprop.lhs(normalized).dequantize()
        rhs = wanted.fprop.rhs(weight * gain).dequantize()
        assert (seen - lhs @ rhs.t()).norm() <= 1e-6 * seen.norm()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4", "fp8-tile", "nvfp4-backward"])
def test_the_gain_can_be_merged_into_the_weight(recipe):
    """For inference, section 3.7: the same bits without a gain; in dX, too."""
    (x, gain, weight, _), grad = leaves()
    results = []
    for tensors in ((gain, weight), (torch.ones_like(gain), weight * gain)):
        y = mxnorm_linear(x, *tensors, precision(recipe))
        results += [y, *torch.autograd.grad(y, x, grad)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def test_wgrad_quantizes_the_normalized_input_along_tokens():
    tensors, grad = leaves()
    x, gain, *_ = tensors
    *_, wgrad, _ = of_layer("mxfp8", tensors, grad)
    quantize = Quantizer(FORMATS["mxfp8-e4m3"].with_options(scale_rounding="rceil"))
    normalized = MXNorm().normalize(x.detach(), 32)
    product = quantize(grad.t()).dequantize() @ quantize(normalized.t()).dequantize().t()
    expected = product * gain.detach()
    assert (wgrad - expected).norm() <= 1e-6 * expected.norm()


def test_the_gain_is_never_divided_by():
    tensors, grad = leaves()
    with torch.no_grad():
        tensors[1].zero_()
    found = of_layer("mxfp8", tensors, grad)
    assert all(tensor.isfinite().all() for tensor in found) and found[2].any()


@pytest.mark.parametrize(
    ("recipe", "named"),
    [("bf16", "is not quantized"), ("fp8-tensorwise", "fp8-tensor"), ("fp8-row", "fp8-row")],
)
def test_an_input_without_blocks_is_refused(recipe, named):
    (x, gain, weight, _), _ = leaves()
    with pytest.raises(ValueError, match=named):
        mxnorm_linear(x, gain, weight, precision(recipe))


def test_autocast_has_no_effect():
    tensors, grad = leaves()
    expected = of_layer("mxfp8", tensors, grad)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(of_layer("mxfp8", tensors, grad), expected, rtol=0, atol=0)


@pytest.mark.parametrize("option", ["fprop.hot_channels=0.1", "fallback=bf16"])
def test_options_that_read_the_whole_input_are_refused(option):
    precision = load_recipe("mxfp8", [option]).configs["mxfp8"]
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    with pytest.raises(ValueError, match="no fallback or hot_channels"):
        mxnorm_linear(x, torch.ones(64), weight, precision)
