"""A norm's backward pass: the reference against FP64 autograd, the kernel against the reference."""

import pytest
import torch

from megatron_lowbit.kernels.norm_grad import norm_grad as fused
from megatron_lowbit.numerics.mxnorm import MXNorm, norm_grad

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(rows, columns, dtype=torch.bfloat16):
    draws = torch.Generator().manual_seed(columns)
    x, grad = (torch.randn(rows, columns, generator=draws).to(dtype).to(DEVICE) for _ in range(2))
    return grad, x, MXNorm().inverse_rms(x, 32)


def test_the_gradient_of_rms_norm():
    """With the RMS itself for the estimate it is what autograd finds in FP64."""
    grad, x, _ = tensors(8, 320, torch.float32)
    exact = x.double().requires_grad_()
    rho = exact.square().mean(-1, keepdim=True).rsqrt()
    (exact * rho).backward(grad.double())
    seen = norm_grad(grad, x, rho.detach().float())
    torch.testing.assert_close(seen.double(), exact.grad, rtol=0, atol=2e-6)


@pytest.mark.parametrize("columns", [32, 64, 320, 384, 1024, 4096, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_references_bits(columns, dtype):
    for rows in (3, 16):
        grad, x, rho = tensors(rows, columns, dtype)
        expected = norm_grad(grad, x, rho)
        assert expected.dtype is dtype
        assert torch.equal(fused(grad, x, rho), expected)


def test_strides_dtypes_and_no_rows():
    grad, x, rho = tensors(32, 64)
    assert torch.equal(fused(grad.float(), x, rho), norm_grad(grad.float(), x, rho))
    for order in (lambda t: t[::2], lambda t: t.t().contiguous().t()):
        other = order(grad), order(x), order(rho)
        assert torch.equal(fused(*other), norm_grad(*(t.contiguous() for t in other)))
    assert fused(grad[:0], x[:0], rho[:0]).shape == (0, 64)


@pytest.mark.gpu
def test_a_gpus_bits_are_a_cpus():
    grad, x, rho = tensors(512, 4096)
    expected = norm_grad(grad.cpu(), x.cpu(), rho.cpu())
    assert torch.equal(fused(grad, x, rho).cpu(), expected)
