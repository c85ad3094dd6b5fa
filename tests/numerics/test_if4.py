"""IF4 against scalars in numpy, one FP32 operation at a time, and the shares of integer blocks."""

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import Draw, Quantizer, Rounding, format_by_name, formats, quantize
from megatron_lowbit.numerics.randomness import uniform
from tests.numerics.conftest import GRIDS, INPUTS, Golden, bytes_of, codes_of, nearest_codes

F32 = np.float32
FLT_MAX = np.finfo(F32).max
E2M1, E4M3 = GRIDS["e2m1"], GRIDS["e4m3"].astype(F32)
INTEGERS = np.arange(8.0)
GOLDEN = Golden()
RULES = ("mse", "mae", "abs_max")


def rounded(scaled: np.ndarray, grid: np.ndarray, numbers: np.ndarray | None) -> np.ndarray:
    """Return indices on a grid of magnitudes: nearest, ties to even; or up below a fraction."""
    scaled = np.minimum(np.abs(scaled), grid[-1]).astype(np.float64)
    low = np.searchsorted(grid, scaled, side="right") - 1
    high = np.minimum(low + 1, 7)
    fraction = (scaled - grid[low]) / np.where(high > low, grid[high] - grid[low], 1)
    if numbers is not None:
        return low + (numbers < fraction)
    return low + ((fraction > 0.5) | ((fraction == 0.5) & (low % 2 == 1)))


@np.errstate(all="ignore")
def slow_if4(x: np.ndarray, rule: str, numbers=(None, None), largest: float = 6.0):
    """Return codes (R, K), scale bytes (R, K/16) and the tensor scale."""
    top, amax = F32(largest * 448), np.abs(x).max()
    blocks = x.reshape(len(x), -1, 16)
    s_enc = min(top / amax, FLT_MAX) if amax else F32(1)
    s_dec = F32(1) / s_enc
    base = np.abs(blocks).max(-1) / F32(largest) * s_enc
    scales = nearest_codes(np.minimum(base, F32(448)), formats.E4M3)
    s = E4M3[scales][..., None]
    scaled = blocks * np.minimum(F32(1) / (s * s_dec), FLT_MAX)
    errors, codes, sign = [], [], np.signbit(x).reshape(blocks.shape)
    for grid, expansion, u in ((E2M1, F32(1), numbers[0]), (INTEGERS, F32(6 / 7), numbers[1])):
        u = None if u is None else u.reshape(blocks.shape)
        code = rounded(scaled * F32(1 if grid is E2M1 else 7 / 6), grid, u)
        values = np.where(sign, -grid[code], grid[code]).astype(F32) * s * amax
        difference = values * expansion / top - blocks
        terms = difference * difference if rule == "mse" else np.abs(difference)
        assert terms.dtype == F32
        error = terms[..., 0]
        for term in np.moveaxis(terms, -1, 0)[1:]:
            error = np.maximum(error, term) if rule == "abs_max" else error + term
        errors.append(error)
        codes.append(code)
    taken = errors[1] < errors[0]
    floats, integers = codes[0] + 8 * sign, np.where(sign, -codes[1], codes[1]) % 16
    codes = np.where(taken[..., None], integers, floats).reshape(x.shape)
    return codes, scales + 128 * taken, s_dec


def check(q, codes, scales, s_dec) -> None:
    np.testing.assert_array_equal(bytes_of(q.scales), scales)
    np.testing.assert_array_equal(codes_of(q), codes)
    assert q.tensor_scale.item() == s_dec
    integers = np.where(codes < 8, codes, codes - 16.0).astype(F32) * F32(6 / 7)
    floats = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
    values = np.where((scales > 127).repeat(16, 1), integers, floats.astype(F32))
    values = values * E4M3[scales & 127].repeat(16, 1) * s_dec
    np.testing.assert_array_equal(q.dequantize().numpy(), values)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", INPUTS)
def test_against_scalars(name, rule):
    x = GOLDEN.x(name).float()
    check(quantize(x, "if4", selection=rule), *slow_if4(x.numpy(), rule))


@pytest.mark.parametrize("exponent", [-37, -20, 0, 20, 37])
def test_against_scalars_on_random_data(exponent):
    """Full FP32 mantissas, block amplitudes over eight decades."""
    rng = np.random.default_rng(exponent % 100)
    amplitude = 10.0 ** rng.uniform(-8, 0, (64, 16)).repeat(16, axis=1)
    x = (rng.standard_normal((64, 256)) * amplitude * 10.0**exponent).astype(F32)
    for rule in RULES:
        check(quantize(torch.from_numpy(x), "if4", selection=rule), *slow_if4(x, rule))


@pytest.mark.parametrize("sixteen_seventeenths", [False, True])
def test_stochastic_rounding(sixteen_seventeenths):
    """Each candidate is rounded by the Philox numbers of its own."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    format, draw = format_by_name("if4", sixteen_seventeenths=sixteen_seventeenths), Draw(7)
    words, counters = draw.key_words(x.device), draw.counters(32, 64, x.device)
    numbers = [uniform(words, *counters, 8, number).double().numpy() for number in (0, 1)]
    largest = 6 * 16 / 17 if sixteen_seventeenths else 6.0
    q = Quantizer(format, Rounding.STOCHASTIC)(x, draw=draw)
    check(q, *slow_if4(x.numpy(), "mse", numbers, largest))


@pytest.mark.slow
def test_shares_of_gaussian_blocks():
    """Integers are taken in 63% (mse), 50% (mae) and 88% (abs_max) of the blocks.

    The squared error is 0.69 times the error of NVFP4 and 0.82 times the error of four-over-six.
    """
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3))
    for rule, share in (("mse", 0.634), ("mae", 0.496), ("abs_max", 0.876)):
        q = quantize(x, "if4", selection=rule)
        assert abs((q.scales.float() < 0).double().mean() - share) < 0.008

    def error(name, **options):
        return (quantize(x, name, **options).dequantize() - x).square().mean()

    assert error("if4") / error("nvfp4") == pytest.approx(0.69, abs=0.01)
    four_over_six = error("nvfp4", four_over_six="mse", max_scale=256)
    assert error("if4") / four_over_six == pytest.approx(0.82, abs=0.01)
