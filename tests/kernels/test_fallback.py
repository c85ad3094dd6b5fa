"""The product that is computed only where another was not finite."""

import pytest
import torch

from megatron_lowbit.kernels.fallback import largest_bits, recompute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [None, torch.nan, -torch.inf])
@pytest.mark.parametrize("has_bias", [False, True])
def test_recompute(dtype, bad, has_bias):
    """Integers: all sums are exact, in any order."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of BF16 numbers")
    generator = torch.Generator().manual_seed(1)
    lhs = torch.randint(-4, 5, (70, 50), generator=generator).to(dtype).to(device)
    rhs = torch.randint(-4, 5, (50, 90), generator=generator).to(dtype).to(device).t()
    bias = torch.arange(90, dtype=dtype, device=device) if has_bias else None
    y = torch.randn(70, 90, generator=generator).to(dtype).to(device)
    before = y.clone()
    if bad is not None:
        y[3, 80] = bad
    amax = largest_bits(y)
    recompute(y, amax, lhs, rhs, bias)
    right = lhs.double() @ rhs.double().t() + (0 if bias is None else bias.double())
    assert torch.equal(y, before if bad is None else right.to(dtype))
    assert amax.view(torch.float32).isfinite() == (bad is None)
