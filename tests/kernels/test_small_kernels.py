"""Small kernels and functions of their own: quotients by constants, means of rows, zeros."""

import pytest
import torch
import triton
import triton.language as tl

from megatron_lowbit.kernels import amaxes
from megatron_lowbit.kernels.means import split_mean
from megatron_lowbit.kernels.scales import quotient_by
from megatron_lowbit.numerics import mean_residual as reference
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8), (40, 200), (1100, 130), (0, 16)])
@pytest.mark.parametrize("transposed", [False, True])
def test_means_of_rows(dtype, shape, transposed):
    """Sums in FP64 in another order, which are exact for so few numbers."""
    x = torch.randn(
        shape[::-1] if transposed else shape, generator=torch.Generator().manual_seed(3)
    )
    x = (x + 3).to(dtype).to(DEVICE)
    x = x.t() if transposed else x
    mean, residual = split_mean(x)
    expected = reference.split_mean(x.float())
    assert mean.dtype is residual.dtype is torch.float32
    assert torch.equal(mean, expected[0]) and torch.equal(residual, expected[1])


SHAPES = [(), (3,), (4, 8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_are_aligned_and_separate(shape):
    parts = amaxes.filled(shape, torch.device("cpu"))
    for number, part in enumerate(parts, 1):
        assert part.shape == shape and part.data_ptr() % 16 == 0
        part += number
    assert all((part == number).all() for number, part in enumerate(parts, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_are_given_once(shape):
    for _ in range(2 * amaxes._BATCH + 1):
        part = amaxes.zeros_of(shape, torch.device("cuda", 0))
        assert not part.any()
        part += 1


@pytest.mark.gpu
def test_each_graph_fills_its_own_zeros_whenever_it_runs():
    device, graphs, parts = torch.device("cuda", 0), [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            taken = [amaxes.zeros_of((), device) for _ in range(3)]
            for part in taken:
                part += 1
        graphs.append(graph)
        parts += taken
    assert len({part.data_ptr() for part in parts}) == 6
    for _ in range(2):
        for graph in graphs:
            graph.replay()
        assert [part.item() for part in parts] == [1.0] * 6
