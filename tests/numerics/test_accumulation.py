"""Sums along K as narrower accumulators make them: an example by hand, and how errors grow."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import Accumulation, gemm, quantize
from megatron_lowbit.numerics.formats import E4M3, round_to_grid

LENGTHS = (512, 1024, 2048, 4096)


def rounded(value: float, mantissa_bits: int) -> float:
    """Return to the nearest binary number of that many fraction bits, half to even, in float64."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, mantissa_bits + 1)), exponent - mantissa_bits - 1)


def test_example_of_the_fp8_chapter():
    """One E4M3 scale for X and one for W, summed in FP32: 0.498377."""
    x, w = [0.4, 0.1, -0.3, 0.05], [1.2, 0.06, -0.04, 0.02]
    exact = 0.0
    operands = []
    for row in (x, w):
        scale = max(map(abs, row)) / 448
        operands.append([rounded(value / scale, 3) * scale for value in row])
    exact = sum(a * b for a, b in zip(*operands, strict=True))
    assert exact == pytest.approx(0.498377, abs=5e-7)
    assert rounded(0.3 / (0.4 / 448), 3) == 320  # the chapter's 336 is between 320 and 352
    for format in ("fp8-1x128-e4m3", "fp8-tensor-e4m3"):
        q = [quantize(torch.tensor([row]), format) for row in (x, w)]
        for accumulation in (None, Accumulation("fp32"), Accumulation("fp32", 2)):
            assert gemm(*q, accumulation=accumulation).item() == pytest.approx(exact, abs=1e-7)
        bf16 = gemm(*q, accumulation=Accumulation("bf16")).item()
        total = 0.0
        for a, b in zip(*operands, strict=True):
            total = rounded(total + a * b, 7)
        assert bf16 == total and abs(bf16 - exact) > 1e-4


def test_error_of_the_fp8_chapters_program():
    """Its operands and 4 x 4 tiles: 3.19%; the chapter has 1e-3."""
    generator = np.random.default_rng(0)
    x, w = (scale * generator.standard_normal(shape).astype(np.float32)
            for scale, shape in ((0.5, (8, 64)), (0.1, (64, 16))))  # fmt: skip
    operands = []
    for matrix in map(torch.from_numpy, (x, w)):
        tiles = matrix.unflatten(0, (-1, 4)).unflatten(2, (-1, 4))
        scale = tiles.abs().amax((1, 3), keepdim=True) / 448
        operands.append((round_to_grid(tiles / scale, E4M3) * scale).view(matrix.shape).double())
    exact = torch.from_numpy(x @ w).double()
    error = (operands[0] @ operands[1] - exact).norm() / exact.norm()
    assert error.item() == pytest.approx(0.0319, abs=1e-4)


@pytest.mark.parametrize("inner, mantissa_bits", [("bf16", 7), ("fp8", 3), ("fp32", 23)])
@pytest.mark.parametrize("promote_every", [1, 3, 8, 128, None])
def test_against_a_loop(inner, mantissa_bits, promote_every):
    """One product after another, in float64 rounded where the accumulator rounds."""
    generator = torch.Generator().manual_seed(3)
    # Products are multiples of 2**-6 and FP32 sums exact: only the accumulator rounds, and E4M3's
    # subnormals, multiples of 2**-9, are not met.
    a, b = (torch.randint(-24, 25, (n, 50), generator=generator) / 8 for n in (3, 4))
    result = gemm(a, b, accumulation=Accumulation(inner, promote_every))
    for i, j in np.ndindex(3, 4):
        outer = inner_sum = 0.0
        for k in range(50):
            inner_sum = rounded(inner_sum + a[i, k].item() * b[j, k].item(), mantissa_bits)
            if promote_every and (k + 1) % promote_every == 0:
                outer, inner_sum = outer + inner_sum, 0.0
        assert result[i, j].item() == outer + inner_sum


def test_fp8_sums_saturate():
    ones = torch.ones(1, 4)
    assert gemm(400 * ones, ones, accumulation=Accumulation("fp8")) == 448
    assert gemm(400 * ones, ones, accumulation=Accumulation("fp8", 1)) == 4 * 384


def relative_error(length: int, inner: str, promote_every: int | None) -> float:
    """Return the error of the norm of an 8 x 8 product of |N(0, 1)|, against float64."""
    generator = torch.Generator().manual_seed(length)
    a, b = (torch.randn(8, length, generator=generator).abs() for _ in range(2))
    exact = a.double() @ b.double().t()
    result = gemm(a, b, accumulation=Accumulation(inner, promote_every)).double()
    return ((result - exact).norm() / exact.norm()).item()


def test_bf16_sums_of_one_sign_drift_and_promotion_stops_it():
    """|N(0, 1)| products: from about 9% at 512 to 59% at 4096, promoted every 128 about 1%."""
    drift = [relative_error(n, "bf16", None) for n in LENGTHS]
    assert 0.07 < drift[0] < 0.12 and 0.55 < drift[-1] < 0.63
    assert all(late > 1.3 * early for early, late in pairwise(drift))
    promoted = [relative_error(n, "bf16", 128) for n in LENGTHS]
    assert all(0.008 < error < 0.014 for error in promoted)
    fp32 = [relative_error(n, "fp32", None) for n in LENGTHS]
    assert max(fp32) < 1e-5


def test_bias_and_empty_sums():
    a, b, bias = torch.ones(2, 5), torch.ones(3, 5), torch.arange(3.0)
    result = gemm(a, b, bias, Accumulation("bf16", 2))
    assert torch.equal(result, (5 + bias).expand(2, 3))
    empty = gemm(torch.ones(2, 0), torch.ones(3, 0), bias, Accumulation("fp32", None))
    assert torch.equal(empty, bias.expand(2, 3))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"'fp16' is not one of fp32, bf16, fp8"):
        Accumulation("fp16")
    for interval in (0, -128):
        with pytest.raises(ValueError, match=f"promote_every {interval} is not positive"):
            Accumulation("bf16", interval)
