"""Every format as every operand of the linear layer; square weights; narrow sums."""

import dataclasses
from itertools import product

import one_layer
import pytest
import torch
from one_layer import ENGINE, history, precision_of, run
from recording_engine import RecordingEngine

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.layers import LinearContext, lowbit_linear, operands
from megatron_lowbit.numerics import (
    FORMATS,
    Accumulation,
    DelayedScaling,
    Hadamard,
    Quantizer,
    Rounding,
    format_by_name,
)
from megatron_lowbit.numerics.gemms import Gemm
from megatron_lowbit.recipes import (
    HIGH_PRECISION,
    GemmPrecision,
    LinearPrecision,
    load_recipe,
    shipped_recipes,
)
from tests.numerics.conftest import assert_same

GEMMS = ("fprop", "dgrad", "wgrad")
M, N, K = 40, 136, 160  # not all of them whole tiles, or whole blocks
SQUARE = [name for name, f in FORMATS.items() if f.square]


def leaves():
    return one_layer.leaves(M, N, K)


def by_roles(input=None, weight=None, grad=None) -> LinearPrecision:
    return LinearPrecision(
        GemmPrecision(input, weight), GemmPrecision(grad, weight), GemmPrecision(grad, input)
    )


# Formats


IN_FP32 = [name for name, f in FORMATS.items() if not f.exact_in_bf16 and not f.square]


@pytest.mark.parametrize("name", IN_FP32)
def test_wgrad_with_the_codes_of_dgrad_is_the_references(name):
    """The gradient is exact in BF16, the input is not, so both are multiplied in FP32."""
    how, products = precision_of("mxfp8", f"input={{format: {name}}}", "grad.axis=dgrad"), []
    x, _, dy = (one.detach().bfloat16() for one in leaves())
    for engine in (ReferenceEngine("tests"), FusedEngine((9, 0))):
        context = LinearContext(how, engine, 1)
        _, grad = operands.quantize_grad(context, dy, True, True)
        _, saved = operands.quantize_input(context, x, None, True)
        of_input = operands.start_wgrad_input(context, saved)()
        products.append(context.gemm(Gemm.WGRAD, grad, of_input, torch.float32))
    assert (products[1] - products[0]).norm() <= 2e-3 * products[0].norm()


ROLES = ("input", "weight", "grad")
# A layer treats formats of a kind alike where one role alone is quantized.
OF_EACH_KIND = ("nvfp4", "nvfp4-2d", "mxfp4", "mxfp8-e4m3-2d", "fp8-1x128-e5m2", "fp8-128x128-e4m3",
                "fp8-tensor-e4m3", "fp8-row-e4m3", "int4-1x32")  # fmt: skip


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize(
    ("format", "roles"),
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] * (case[1] != ROLES and case[0] not in OF_EACH_KIND)
        )
        for case in product(FORMATS, [*((role,) for role in ROLES), ROLES])
    ],
)
def test_every_format_in_every_role(format, roles, rounding):
    """Finite, and as close to the exact product as the operands that are quantized.

    M mantissa bits round to nearest within 2**-(M+1) of a value (clipping and subnormals cost no
    more on Gaussian data), stochastically within 2**-M; two operands' errors add in square.
    """
    x, weight, dy = leaves()
    quantizer = Quantizer(FORMATS[format], rounding)
    unit = 2.0 ** -(FORMATS[format].element.mantissa_bits + (rounding is Rounding.NEAREST_EVEN))
    results = run(x, weight, dy, by_roles(**dict.fromkeys(roles, quantizer)))
    high = run(x, weight, dy, HIGH_PRECISION)
    a, b = x.detach().double(), weight.detach().double()
    exact = (a @ b.t(), dy.double() @ b, dy.double().t() @ a)
    pairs = (("input", "weight"), ("grad", "weight"), ("grad", "input"))
    for result, plain, expected, pair in zip(results, high, exact, pairs, strict=True):
        count = sum(role in roles for role in pair)
        if count == 0:
            assert torch.equal(result, plain)
            continue
        assert result.isfinite().all()
        error = (result - expected).norm() / expected.norm()
        assert 0.1 * unit < error < count**0.5 * unit


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_close_to_exact(name):
    """Two stochastic E2M1 operands at most: sqrt(2) / 2 of the product, with 3/4 scaling too."""
    x, weight, dy = leaves()
    precision = next(iter(load_recipe(name).configs.values()))
    a, b = x.detach().double(), weight.detach().double()
    exact = (a @ b.t(), dy.double() @ b, dy.double().t() @ a)
    results = run(x, weight, dy, precision, amax_history=history())
    for result, expected, gemm in zip(results, exact, GEMMS, strict=True):
        error = (result - expected).norm() / expected.norm()
        assert error < 0.5**0.5
        assert (error > 1e-3) == precision.gemms[gemm].quantized


# A weight in square blocks


@pytest.mark.parametrize(
    "format, options",
    [
        (name, {option: values[-1]} if option else {})
        for name in SQUARE
        for option, values in [(None, ()), *FORMATS[name].OPTIONS.items()]
        if option != "row_scaled"  # rows have no scale of square blocks
    ],
)
def test_square_weights_are_quantized_once(format, options):
    """dgrad's are the transpose of fprop's, bit for bit what quantizing the transpose gives."""
    x, weight, dy = leaves()
    quantizer = Quantizer(format_by_name(format, **options))
    seen = RecordingEngine()
    run(x, weight, dy, by_roles(weight=quantizer), engine=seen)
    assert seen.shapes == [(N, K)]
    (_, forward), (_, backward), _ = seen.multiplied
    assert_same(forward, quantizer(weight.detach()))
    assert_same(backward, quantizer(weight.detach().t()))
    torch.testing.assert_close(backward.dequantize(), forward.dequantize().t(), rtol=0, atol=0)


ONCE = by_roles(weight=Quantizer(FORMATS["fp8-tensor-e4m3"]))
TILES = by_roles(weight=Quantizer(FORMATS["fp8-128x128-e4m3"]))


def with_dgrad(precision, **fields):
    return dataclasses.replace(precision, dgrad=dataclasses.replace(precision.dgrad, **fields))


TWICE = {
    "another format": with_dgrad(ONCE, rhs=Quantizer(FORMATS["fp8-tensor-e5m2"])),
    "another option": with_dgrad(
        ONCE, rhs=Quantizer(format_by_name("fp8-tensor-e4m3", scale_format="pow2"))
    ),
    "another tensor scale": with_dgrad(ONCE, tensor_scale="group"),
    "another history": with_dgrad(ONCE, delayed=DelayedScaling()),
    "rows": by_roles(weight=Quantizer(FORMATS["fp8-1x128-e4m3"])),
    "stochastic": by_roles(weight=Quantizer(FORMATS["fp8-tensor-e4m3"], Rounding.STOCHASTIC)),
    "a transform": with_dgrad(
        by_roles(*[Quantizer(FORMATS["fp8-128x128-e4m3"])] * 3), hadamard=Hadamard(32)
    ),
}


@pytest.mark.parametrize("why", TWICE)
def test_a_weight_that_does_not_serve_both_is_quantized_twice(why):
    seen = RecordingEngine()
    run(*leaves(), TWICE[why], engine=seen, amax_history=history())
    assert seen.shapes.count((N, K)) == 1 and seen.shapes.count((K, N)) == 1


def test_a_tensor_scale_that_tiles_do_not_have_makes_no_difference():
    """fprop and dgrad may say different things of it: the weight's bits are the same."""
    seen = RecordingEngine()
    run(*leaves(), with_dgrad(TILES, tensor_scale="group"), engine=seen)
    assert seen.shapes == [(N, K)]


# Accumulation


def narrow_sum(lhs, rhs, every):
    """Return lhs . rhs^T, BF16 sums of ``every`` products, added in FP32."""
    total = torch.zeros(lhs.shape[0], rhs.shape[0])
    for chunk in torch.arange(lhs.shape[1]).split(every):
        inner = torch.zeros_like(total)
        for k in chunk:
            inner = (inner + lhs[:, k, None] * rhs[None, :, k]).bfloat16().float()
        total += inner
    return total


@pytest.mark.parametrize("format", [None, "mxfp8-e4m3"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_accumulation_reaches_its_gemm(gemm, format):
    """One GEMM sums narrowly, quantized or not; the other two do not change by a bit."""
    x, weight, dy = one_layer.leaves(24, 40, 56)
    quantizer = format and Quantizer(FORMATS[format])
    base = by_roles(quantizer, quantizer, quantizer)
    sums = Accumulation("bf16", 16)
    of_gemm = dataclasses.replace(base.gemms[gemm], accumulation=sums)
    seen = RecordingEngine()
    results = run(x, weight, dy, dataclasses.replace(base, **{gemm: of_gemm}), engine=seen)
    assert seen.accumulations == [sums if name == gemm else None for name in GEMMS]
    operands = {
        "fprop": (x, weight), "dgrad": (dy, weight.t()), "wgrad": (dy.t(), x.t())
    }[gemm]  # fmt: skip
    lhs, rhs = (quantizer(t.detach()).dequantize() if quantizer else t.detach() for t in operands)
    usual = run(x, weight, dy, base)
    for name, result, before in zip(GEMMS, results, usual, strict=True):
        if name == gemm:
            assert torch.equal(result, narrow_sum(lhs, rhs, 16))
            assert not torch.equal(result, before)
        else:
            assert torch.equal(result, before)


def test_accumulation_and_bias_in_bf16():
    """The bias joins the FP32 total, and the result is BF16 as x is."""
    x, weight, _ = (t.detach().bfloat16() for t in one_layer.leaves(8, 16, 32))
    bias = torch.linspace(-3, 3, 16).bfloat16()
    precision = LinearPrecision(GemmPrecision(accumulation=Accumulation("bf16", 8)))
    y = lowbit_linear(x, weight, LinearContext(precision, ENGINE, 0), bias=bias)
    expected = narrow_sum(x.float(), weight.float(), 8) + bias.float()
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected.bfloat16())
