"""Means of rows on a GPU, and what is left of a matrix without them."""

import pytest
import torch

from megatron_lowbit.kernels.means import split_mean
from megatron_lowbit.numerics import mean_residual as reference
from tests.kernels.test_quantize import DEVICE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8), (40, 200), (1100, 130), (0, 16)])
@pytest.mark.parametrize("transposed", [False, True])
def test_bits_of_the_reference(dtype, shape, transposed):
    """Sums in FP64 in another order: those of so few numbers are exact."""
    x = torch.randn(
        shape[::-1] if transposed else shape, generator=torch.Generator().manual_seed(3)
    )
    x = (x + 3).to(dtype).to(DEVICE)
    x = x.t() if transposed else x
    mean, residual = split_mean(x)
    expected = reference.split_mean(x.float())
    assert mean.dtype is residual.dtype is torch.float32
    assert torch.equal(mean, expected[0]) and torch.equal(residual, expected[1])
