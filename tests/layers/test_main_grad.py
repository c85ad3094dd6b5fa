"""Gradients that a layer adds to main_grad: one rounding, whatever main_grad's dtype."""

import pytest
import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.recipes import HIGH_PRECISION, load_recipe

ENGINE = ReferenceEngine("test")
MXFP8 = load_recipe("mxfp8").configs["mxfp8"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", [MXFP8, HIGH_PRECISION], ids=["mxfp8", "high precision"])
def test_microbatches_add_with_one_rounding_each(precision, dtype, device):
    """Small integers, exact in E4M3 and in FP32 sums; their sums have more bits than BF16."""
    generator = torch.Generator().manual_seed(1)

    def integers(*shape):
        return torch.randint(-8, 9, shape, generator=generator).bfloat16().to(device)

    weight = integers(64, 32).requires_grad_()
    weight.main_grad = torch.zeros(64, 32, dtype=dtype, device=device)
    engine = ENGINE if device == "cpu" else select_engine(weight.device)
    expected, twice = torch.zeros_like(weight.main_grad), torch.zeros_like(weight.main_grad)
    for _ in range(4):
        x, grad = integers(64, 32), integers(64, 64)
        y = lowbit_linear(x, weight, LinearContext(precision, engine, 0, accumulate_main_grad=True))
        y.backward(grad)
        dw = grad.double().t() @ x.double()
        expected = (expected.double() + dw).to(dtype)
        twice = (twice.double() + dw.bfloat16().double()).to(dtype)
    assert torch.equal(weight.main_grad, expected)
    assert not torch.equal(weight.main_grad, twice)
