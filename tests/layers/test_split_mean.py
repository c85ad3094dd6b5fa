"""A linear layer whose input and gradient are quantized as residuals from their means."""

import pytest
import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.gemm import with_mean
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.layers.keys import operand_key
from megatron_lowbit.numerics import Draw, Quantizer, Rounding, format_by_name
from megatron_lowbit.numerics.mean_residual import split_mean
from megatron_lowbit.recipes import load_recipe

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
    generator = torch.Generator().manual_seed(5)
    x, weight, dy = (torch.randn(s, generator=generator) for s in ((40, 96), (56, 96), (40, 56)))
    return (x + 4).requires_grad_(), weight.requires_grad_(), dy - 2


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
    with pytest.raises(UserError) as caught:
        precision(override)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_kernels_leave_it_to_the_reference():
    """A GPU multiplies the FP32 values, mean included, and no codes without it."""
    quantizer = Quantizer(format_by_name("nvfp4"), splits_mean=True)
    assert NEAREST.has_kernel and not quantizer.has_kernel
    q = quantizer(torch.randn(8, 32) + 3)
    assert torch.equal(with_mean(q), q.dequantize())
    assert with_mean(NEAREST(torch.randn(8, 32))).mean is None
