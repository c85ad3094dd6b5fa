"""The page on tile sizes, outliers and accumulators, and the model of Hopper's sums on it."""

import math
import re
from fractions import Fraction
from pathlib import Path

import fp8 as fp8_page
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_lowbit.numerics import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "research" / "fp8.md"


@pytest.mark.slow
def test_the_page_s_figures_are_the_script_s(tmp_path):
    text, copy = PAGE.read_text(), tmp_path / "fp8.md"
    # The last table is of GPUs.
    made, end, measured = text.partition("<!-- /accumulators -->")
    copy.write_text(re.sub(r"^\|.*\n", "", made, flags=re.MULTILINE) + end + measured)
    assert copy.read_text().count("%") < text.count("%") / 10
    fp8_page.main(["--document", str(copy)])
    assert copy.read_text() == text


def cut(value: Fraction, largest: Fraction) -> Fraction:
    """Return value towards zero, to a multiple of 2**-13 of the power of two in ``largest``."""
    if not largest:
        return value
    unit = Fraction(2) ** (math.frexp(float(abs(largest)))[1] - 1 - 13)
    return math.trunc(value / unit) * unit


@pytest.mark.parametrize("promote_every", [32, 96, None])
def test_tensor_core_sums_against_fractions(promote_every):
    draws = np.random.default_rng(5)
    a, b = (torch.from_numpy(draws.standard_normal((2, 192)).astype(np.float32)) for _ in range(2))
    a, b = (x.to(torch.float8_e4m3fn).float() for x in (a, b * 40))
    made = fp8_page.tensor_core_sums(a, b, promote_every)
    for i, j in np.ndindex(2, 2):
        pairs = zip(a[i].tolist(), b[j].tolist(), strict=True)
        products = [Fraction(x) * Fraction(y) for x, y in pairs]
        outer, inner = np.float32(0), Fraction(0)
        for start in range(0, 192, 32):
            terms = [inner, *products[start : start + 32]]
            largest = max(map(abs, terms))
            inner = sum(cut(term, largest) for term in terms)
            inner = cut(inner, inner)
            if (start + 32) % (promote_every or 192) == 0:
                outer, inner = outer + np.float32(float(inner)), Fraction(0)
        assert made[i, j].item() == outer
    exact = a.double() @ b.double().t()
    assert (made.double() != exact).any()


def test_zeros_beside_outliers_are_those_below_half_the_smallest_number():
    """E4M3's is 2**-9, with the largest magnitude of a tile at 448; a tie goes to zero."""
    x = np.random.default_rng(0).standard_normal((512, 512), np.float32).astype(np.float64)
    x[:, 200] *= 1e5
    largest = np.abs(x.reshape(512, 4, 128)).max(-1).repeat(128, axis=1)
    others = np.arange(512) != 200
    zeros = (np.abs(x) / largest * 448 <= 2**-10)[:, others].mean()
    assert fp8_page.others_error(FORMATS["fp8-1x128-e4m3"], "one column", 1e5)[1] == zeros > 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("one_sign", [False, True])
def test_the_model_beside_a_gpu_s_sums(one_sign):
    """Hopper's error without promotion within a factor of 2 of the model's; with it, far smaller.

    cuBLAS may share a sum's products out between programs and add their sums in FP32.
    """
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a model of Hopper's tensor cores")
    left, right = (operand.codes.cuda() for operand in fp8_page.operands(one_sign))
    one, kind = torch.ones((), device="cuda"), F.ScalingType.TensorWise
    exact = left.double() @ right.double().t()
    errors = {
        fast: fp8_page.relative_error(
            F.scaled_mm(left, right.t(), one, kind, one, kind,
                        output_dtype=torch.float32, use_fast_accum=fast), exact)
        for fast in (True, False)
    }  # fmt: skip
    model = fp8_page.sum_error(one_sign, "tensor core", None)
    print(f"one sign {one_sign}: {errors}, model {model}")
    assert model / 2 < errors[True] < 2 * model
    assert errors[False] < errors[True] / 4
