"""RMSNorm with sums in a fixed order: torch's, to FP32 rounding."""

import pytest
import torch

from megatron_lowbit.numerics.rmsnorm import RMSNorm


@pytest.mark.parametrize("columns", [1, 7, 24, 100, 4096])
def test_it_is_torchs(columns):
    x = torch.randn(64, columns, generator=torch.Generator().manual_seed(columns))
    expected = torch.nn.functional.rms_norm(x.double(), (columns,), eps=1e-5)
    assert torch.allclose(RMSNorm().normalize(x).double(), expected, rtol=1e-6, atol=0)
