"""Quantization errors: sums against definitions written out in float64, and how they add up."""

import math

import pytest
import torch

from megatron_lowbit.analysis.quantization_error import add, figures, gemm_sums
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.numerics import hadamard_transform
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm
from megatron_lowbit.recipes import Layer, load_recipe

MIDDLE = Layer("decoder.layers.16.mlp.linear_fc1", 16, 32)
# Quantizes nothing, so that only the layer's own formulas are left.


def call_of(name: str, *overrides: str) -> LinearContext:
    precision = load_recipe(name, overrides).precision_for(MIDDLE)
    return LinearContext(precision, ReferenceEngine("a test"), key=5, training=False)


def numbers(sums) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


@pytest.fixture
def operands():
    random = torch.Generator().manual_seed(2)
    lhs = torch.randn(96, 128, generator=random) * torch.rand(96, 1, generator=random).exp()
    lhs[3, 7], lhs[4, :32] = 90.0, 0.0
    return lhs, torch.randn(64, 128, generator=random)


@pytest.mark.parametrize("gemm", GEMM_ROLES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4-backward", "fp8-tile", "mxfp8"])
def test_figures_by_their_definitions(operands, name, gemm):
    call = call_of(name)
    measured = figures(numbers(gemm_sums(call, gemm, *operands)))
    tokens = 96 if gemm != "wgrad" else 128
    values = []
    for role, x in zip(GEMM_ROLES[gemm], operands, strict=True):
        request = call.request(gemm, role, tokens)
        if request is None:
            values.append(x.double())
            assert f"{gemm}/{role}/sqnr_db" not in measured
            continue
        wanted = x
        if request.hadamard is not None:
            wanted = hadamard_transform(x, request.hadamard, request.sign_key)
        wanted, got = wanted.double(), request.quantize(x).dequantize().double()
        values.append(got)
        noise = (got - wanted).square().sum() / wanted.square().sum()
        seen = {k.rpartition("/")[2]: v for k, v in measured.items() if f"{gemm}/{role}/" in k}
        assert seen["sqnr_db"] == pytest.approx(-10 * math.log10(noise), rel=1e-6)
        lost = ((got == 0) & (wanted != 0)).sum() / (wanted != 0).sum()
        assert seen["flushed"] == pytest.approx(float(lost))
        assert seen["amax"] == x.abs().max()
        block = request.quantizer.format.block
        if 1 < block < x.shape[1]:
            tops = wanted.unflatten(1, (-1, block)).abs().amax(-1)
            tops = tops[tops > 0].log2()
            assert seen["block_spread"] == pytest.approx(float(tops.std(correction=0)), rel=1e-6)
    if not any(f"{gemm}/{role}/amax" in measured for role in GEMM_ROLES[gemm]):
        assert measured == {}
        return
    exact = operands[0].double() @ operands[1].double().t()
    error = (values[0] @ values[1].t() - exact).norm() / exact.norm()
    assert measured[f"{gemm}/error"] == pytest.approx(float(error), rel=1e-4)


@pytest.mark.parametrize("name", ["nvfp4", "averis", "quartet2", "tetrajet2"])
def test_errors_are_the_layers(name):
    """Also where a GEMM takes values of another one's operand, or quantizes them again."""
    random = torch.Generator().manual_seed(3)
    x, weight, dy = (torch.randn(s, generator=random) for s in ((96, 128), (64, 128), (96, 64)))
    x, call = (x + 1).requires_grad_(), call_of(name)
    weight.requires_grad_()
    y = lowbit_linear(x, weight, call)
    dx, dw = torch.autograd.grad(y, [x, weight], dy)
    x, weight = x.detach(), weight.detach()
    products = {"fprop": (x, weight, y.detach()), "dgrad": (dy, weight.t(), dx)}
    products["wgrad"] = dy.t(), x.t(), dw
    for gemm, (lhs, rhs, made) in products.items():
        measured = figures(numbers(gemm_sums(call, gemm, lhs, rhs)))
        exact = lhs.double() @ rhs.double().t()
        error = (made - exact).norm() / exact.norm()
        assert measured[f"{gemm}/error"] == pytest.approx(float(error), rel=1e-4)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4-backward"])
def test_a_transform_fills_up_an_expert_s_tokens(operands, name):
    """An expert's tokens, here 61, are not a multiple of a block or of a transform."""
    lhs, rhs = (x[:, :61] for x in operands)
    call = call_of(name)
    measured = numbers(gemm_sums(call, Gemm.WGRAD, lhs, rhs))
    for role, x in (("grad", lhs), ("input", rhs)):
        request = call.request(Gemm.WGRAD, role, len(x))
        exact = hadamard_transform(x, request.hadamard, request.sign_key)
        block = request.quantizer.format.block
        full = torch.nn.functional.pad(exact, (0, -exact.shape[1] % block))
        amaxes = full.reshape(len(x), -1, block).abs().amax(-1)
        assert measured[f"wgrad/{role}/blocks"] == (amaxes > 0).sum()


def test_saturated_values_are_those_beyond_the_largest(operands):
    """NVFP4's scales are rounded: a block's largest value may lie beyond 6 of them."""
    call = call_of("nvfp4")
    x = operands[0]
    made = call.request("fprop", "input", 96).quantize(x)
    scales = (made.scales.float() * made.tensor_scale).repeat_interleave(16, dim=1)
    beyond = (x.abs() > 6 * scales) & (scales > 0)
    measured = figures(numbers(gemm_sums(call, "fprop", *operands)))
    assert 0 < float(beyond.double().mean()) < 0.1
    assert measured["fprop/input/saturated"] == pytest.approx(
        float(beyond.double().mean()), rel=0.02
    )


@pytest.mark.parametrize("largest", [3.4e38, math.inf, math.nan])
def test_a_diverging_run_has_figures(operands, largest):
    """Quantized, the largest number of FP32 is 2^128, which overflows when it is decoded."""
    operands[0][3, 7] = largest
    measured = figures(numbers(gemm_sums(call_of("mxfp8"), "fprop", *operands)))
    decibels = measured["fprop/input/sqnr_db"]
    assert decibels == -math.inf if largest == 3.4e38 else math.isnan(decibels)


def test_sums_add_up(operands):
    """Over two halves of the tokens: as of all of them, where blocks do not reach over."""
    call = call_of("mxfp8")
    lhs, rhs = operands
    total: dict[str, float] = {}
    for half in lhs.chunk(2):
        sums = numbers(gemm_sums(call, "fprop", half, rhs))
        add(total, {k: v for k, v in sums.items() if "/weight/" not in k})
    full = numbers(gemm_sums(call, "fprop", lhs, rhs))
    full = {k: v for k, v in full.items() if "/weight/" not in k}
    assert total == pytest.approx(full, rel=1e-9)


def test_the_error_of_a_product_with_hot_channels(operands):
    """Corrected channels are part of the product: two fifths of them lower its error."""
    noise = [
        numbers(gemm_sums(call_of("nvfp4", *overrides), Gemm.FPROP, *operands))["fprop/noise"]
        for overrides in ([], ["fprop.hot_channels=0.4"])
    ]
    assert noise[1] < 0.8 * noise[0]


def test_the_error_of_a_product_that_falls_back(operands):
    """A product that is not finite is measured as it is computed again."""
    lhs, rhs = operands[0].clone(), 1e-3 * operands[1]
    lhs[3, 7] = 3.4e38  # whose tile overflows when it is decoded
    for overrides, noise in (((), math.inf), (("fprop.fallback=bf16",), 0.0)):
        sums = gemm_sums(call_of("fp8-tile", *overrides), Gemm.FPROP, lhs, rhs)
        assert sums["fprop/noise"] == noise
