"""The reference GEMM against float64, within FP32 accumulation's error."""

import pytest
import torch

from megatron_lowbit.numerics import QuantizedTensor, gemm, quantize
from tests.numerics.conftest import randn

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def values_of(x):
    """Return float64 values, decoded here from codes and scales."""
    if not isinstance(x, QuantizedTensor):
        return x.double()
    codes = torch.stack([x.codes & 15, x.codes >> 4], dim=-1).flatten(1).long()
    values = torch.where(codes >= 8, -1.0, 1.0) * VALUES[codes & 7]
    scales = x.scales.float().double().repeat_interleave(16, dim=1)
    return (values * scales * x.tensor_scale.double())[:, : x.shape[-1]]


@pytest.mark.parametrize("m, n, k", [(16, 32, 64), (7, 5, 200), (33, 9, 1024)])
@pytest.mark.parametrize(
    "left, right", [("nvfp4", "nvfp4-2d"), ("nvfp4-2d", None), (None, "nvfp4")]
)
def test_against_float64(m, n, k, left, right):
    """K products and sums and two decodings: (K + 2) * 2**-24 of sum |a||b| bounds any order."""
    lhs, rhs = randn(m, k, seed=k), randn(n, k, seed=n)
    lhs = quantize(lhs, left) if left else lhs
    rhs = quantize(rhs, right) if right else rhs
    product = gemm(lhs, rhs)
    assert product.shape == (m, n) and product.dtype == torch.float32
    a, b = values_of(lhs), values_of(rhs)
    bound = (k + 2) * 2**-24 * (a.abs() @ b.abs().t())
    assert ((product.double() - a @ b.t()).abs() <= bound).all()


def test_high_precision_keeps_its_dtype():
    a, b = randn(8, 32, seed=0).bfloat16(), randn(4, 32, seed=1).bfloat16()
    assert torch.equal(gemm(a, b), a @ b.t()) and gemm(a, b).dtype == torch.bfloat16
    q = quantize(b, "nvfp4")
    mixed = gemm(a, q)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), values_of(a) @ values_of(q).t(), rtol=0, atol=1e-4)
    assert torch.equal(gemm(q, a), mixed.t()) or torch.allclose(gemm(q, a), mixed.t(), atol=1e-5)
