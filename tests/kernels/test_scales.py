"""Quotients by constants, on a GPU of all significands."""

import pytest
import torch
import triton
import triton.language as tl

from megatron_lowbit.kernels.scales import quotient_by
from tests.kernels.test_quantize import DEVICE

FIRST, LAST = 0x3F800000, 0x40000000
"""FP32's bits of 1 and 2."""


@triton.jit
def quotients_kernel(x, out, TOP: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + place, quotient_by(tl.load(x + place), TOP))


@pytest.mark.parametrize("top", [6.0 * 256, 6.0 * 448])
def test_quotients_are_those_of_ieee(top):
    """Powers of two change exponents alone; zero, FP32's largest number and infinity."""
    bits = torch.arange(FIRST, LAST, 1 if DEVICE == "cuda" else 2**13, dtype=torch.int32)
    ends = torch.tensor([0.0, torch.finfo(torch.float32).max, torch.inf])
    x = torch.cat([bits.view(torch.float32), ends.repeat(1024)]).to(DEVICE)
    out = torch.empty_like(x)
    quotients_kernel[(len(x) // 1024,)](x, out, top, 1024, enable_fp_fusion=False)
    assert torch.equal(out, x / torch.full_like(x, top))
