"""A linear layer whose input and gradient are quantized as residuals from their means."""

from dataclasses import replace

import one_layer
import pytest
import torch

from megatron_lowbit.kernels import fused, gemm, means
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.kernels.operands import ExactBF16
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.numerics import Draw, Quantizer, Request, Rounding, format_by_name
from megatron_lowbit.numerics.mean_residual import split_mean
from megatron_lowbit.numerics.randomness import operand_key
from megatron_lowbit.recipes import load_recipe
from tests.kernels.test_quantize import DEVICE
from tests.recipes.conftest import refused

KEY = 77
AVERIS = [
    "weight.format=nvfp4", "wgrad.hadamard=none", "input.split_mean=true", "input.axis=fprop",
    "grad.split_mean=true", "grad.axis=dgrad",
]  # fmt: skip
NEAREST = Quantizer(format_by_name("nvfp4"))
STOCHASTIC = Quantizer(format_by_name("nvfp4"), Rounding.STOCHASTIC)


def precision(*overrides):
    return load_recipe("nvfp4", [*AVERIS, *overrides]).configs["nvfp4"]


def leaves():
    x, weight, dy = one_layer.leaves(40, 56, 96)
    return (x.detach() + 4).requires_grad_(), weight, dy - 2


def test_both_gemms_take_the_same_values():
    """X in fprop and wgrad, dY in dgrad and wgrad: mean plus quantized residual, one draw."""
    x, weight, dy = leaves()
    y = lowbit_linear(x, weight, LinearContext(precision(), ReferenceEngine("tests"), KEY))
    dx, dw = torch.autograd.grad(y, [x, weight], dy)

    def split(t, quantizer, **options):
        mean, residual = split_mean(t.detach())
        return (mean + quantizer(residual, **options).dequantize()).double()

    rows = split(x, NEAREST)
    grads = split(dy, STOCHASTIC, draw=Draw(operand_key(KEY, "dgrad", "grad")))
    wide, high = (NEAREST(t.detach()).dequantize().double() for t in (weight, weight.t()))
    for result, expected in ((y, rows @ wide.t()), (dx, grads @ high.t()), (dw, grads.t() @ rows)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


def test_it_is_said():
    said = [str(gemm) for gemm in precision().gemms.values()]
    assert said == [
        "mean + nvfp4 x nvfp4",
        "mean + nvfp4 SR x nvfp4",
        "mean + nvfp4 SR x mean + nvfp4, right of fprop, left of dgrad",
    ]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("weight.split_mean=true", ["fprop.weight", "split_mean is for input and grad"]),
        ("weight.row_scaled=true", ["fprop.weight", "row_scaled is for input and grad"]),
        ("input.axis=own", ["wgrad.input", "split_mean needs axis fprop"]),
        ("grad.axis=own", ["wgrad.grad", "split_mean needs axis dgrad"]),
        ("grad.axis=fprop", ["grad.axis", "input and weight"]),
        ("weight.axis=dgrad", ["weight.axis", "dgrad is for grad"]),
        ("fprop.hadamard={size: 16}", ["fprop", "split_mean: not with a hadamard"]),
        ("wgrad.grad.rounding=nearest", ["wgrad.grad", "rounding are dgrad's"]),
        ("wgrad.fallback=bf16", ["wgrad", "keeps no operand in high precision"]),
    ],
)
def test_refused(override, parts):
    refused(precision, override, parts=parts)


@pytest.mark.parametrize("rounding", list(Rounding))
def test_kernels_quantize_residuals(rounding):
    """A GPU's operand has the reference's bits, and the mean of its rows."""
    format = format_by_name("nvfp4")
    quantizer, draw = Quantizer(format, rounding, splits_mean=True), Draw(3)
    x = (torch.randn(40, 96, generator=torch.Generator().manual_seed(2)) + 3).to(DEVICE)
    request = Request(quantizer, draw=draw, partner=format, needs_codes=True)
    made, _ = FusedEngine((9, 0)).quantize(x, request, None)
    expected = quantizer(x, draw=draw)
    for name in ("codes", "scales", "tensor_scale", "mean"):
        seen, known = (getattr(one, name) for one in (made, expected))
        assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (seen, known))), name
    values, _ = FusedEngine((9, 0)).quantize(x, replace(request, needs_codes=False), None)
    assert isinstance(values, ExactBF16) and torch.equal(values.dequantize(), made.dequantize())


@pytest.fixture
def exact_products(monkeypatch):
    """Take cuBLAS's place without a GPU, and forbid products of FP32 values."""

    def multiply(a, b, factor, out_dtype, out=None, beta=True):
        assert a.dtype is b.dtype is torch.bfloat16
        product = a.float() @ b.float().t() * (1.0 if factor is None else factor)
        if out is None:
            return product.to(out_dtype)
        return out.add_(product) if beta else out.copy_(product)

    if DEVICE == "cpu":
        monkeypatch.setattr(gemm, "scaled_matmul", multiply)
        monkeypatch.setattr(
            torch, "mm", lambda a, b, out_dtype: multiply(a, b.t(), None, out_dtype)
        )
    monkeypatch.setattr(fused, "plain", None)  # which dequantizes


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("main_grad", [False, True])
def test_products_are_exact_and_have_the_means(main_grad):
    """Those of the reference layer, but for the order of FP32 sums."""
    results = []
    for engine in (ReferenceEngine("tests"), FusedEngine((9, 0))):
        x, weight, dy = (t.to(DEVICE).detach() for t in leaves())
        x.requires_grad_()
        weight.requires_grad_()
        weight.main_grad = torch.ones_like(weight)
        context = LinearContext(precision(), engine, KEY, accumulate_main_grad=main_grad)
        y = lowbit_linear(x, weight, context)
        dx, dw = torch.autograd.grad(y, [x, weight], dy)
        results.append((y, dx, weight.main_grad if main_grad else dw))
    for seen, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_products_have_scales_of_rows_and_means(left, right):
    rows = format_by_name("nvfp4", row_scaled=True)
    x, weight = (t.detach().to(DEVICE) + 2 for t in leaves()[:2])
    lhs = Quantizer(rows, splits_mean=left)(x)
    for format in (rows, NEAREST.format):
        rhs = Quantizer(format, splits_mean=right)(weight)
        y = FusedEngine((9, 0)).gemm(lhs, rhs).double()
        expected = lhs.dequantize().double() @ rhs.dequantize().double().t()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


def test_scales_of_rows_along_the_terms_take_fp32():
    how = precision("input.row_scaled=true")
    assert not how.fprop.dequantizes and not how.dgrad.dequantizes and how.wgrad.dequantizes
    assert precision("grad.row_scaled=true").wgrad.dequantizes
    assert not precision().wgrad.dequantizes


def test_what_is_not_exact_is_dequantized():
    """Blocks of FP8 and FP32 scales have no BF16 numbers."""
    x = torch.randn(8, 32, device=DEVICE) + 3
    codes = Quantizer(format_by_name("fp8-1x128-e4m3"), splits_mean=True)(x)
    other = NEAREST(torch.randn(8, 32, device=DEVICE))
    left, right = means.with_means(codes, other)
    assert torch.equal(left, codes.dequantize()) and right is other
    assert means.with_means(other, other) == (other, other)
    exact = Quantizer(format_by_name("nvfp4"), splits_mean=True)(x)
    assert torch.equal(means.with_means(exact, other)[0].dequantize(), exact.dequantize())
