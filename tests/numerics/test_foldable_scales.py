"""NVFP4 with block scales that fold into FP8: scalars, signal-to-noise ratios, exactness."""

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import FORMATS, Draw, Quantizer, Rounding
from megatron_lowbit.numerics.block_formats.nvfp4 import foldable_scales
from megatron_lowbit.numerics.folding import fold, fold_scale, folded_format
from megatron_lowbit.numerics.formats import E2M1
from tests.numerics.conftest import GRIDS, nearest_codes

F32 = np.float32
# Mantissas 1, 1.25 and 1.5 of E4M3's normal numbers, and its subnormals but 7.
ALLOWED = np.array(
    [m * 2.0**-9 for m in range(7)]
    + [m * 2.0**e for e in range(-6, 9) for m in (1, 1.25, 1.5)]
)  # fmt: skip
KINDS = ("foldable", "foldable-up")


def quantizer(kind: str, rounding=Rounding.NEAREST_EVEN, name="nvfp4") -> Quantizer:
    return Quantizer(FORMATS[name].with_options(block_scales=kind), rounding)


def slow_scale(value: float, up: bool) -> float:
    """Return the allowed scale for a number, by looking at all of them."""
    value = min(value, 384.0)
    if up:
        return ALLOWED[value <= ALLOWED][0]
    distance = np.abs(ALLOWED - value)
    return ALLOWED[distance == distance.min()][-1]


@pytest.mark.parametrize("up", [False, True])
def test_scales(up):
    """Around every allowed scale and middle, and random ones over all binades."""
    rng = np.random.default_rng(0)
    middles = (ALLOWED[1:] + ALLOWED[:-1]) / 2
    at = np.concatenate([ALLOWED, middles, 2.0 ** rng.uniform(-12, 9, 4000)]).astype(F32)
    near = [np.nextafter(at, F32(side)) for side in (0, 1000)]
    x = np.concatenate([at, *near, [F32(3e38), F32(1e-40)]]).astype(F32)
    seen = foldable_scales(torch.from_numpy(x), up).double().numpy()
    np.testing.assert_array_equal(seen, [slow_scale(float(value), up) for value in x])
    assert foldable_scales(torch.tensor([torch.nan]), up).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_codes(kind):
    """Scales and nearest codes of a tensor, one FP32 operation at a time."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((16, 64)) * 10.0 ** rng.uniform(-5, 0, (16, 4)).repeat(16, 1)).astype(
        F32
    )
    s_enc = F32(2304) / np.abs(x).max()
    s_dec = F32(1) / s_enc
    amaxes = np.abs(x).reshape(16, 4, 16).max(-1)
    scales = [[slow_scale(float(a * (s_enc * (F32(1) / F32(6)))), kind[8:] == "-up") for a in row]
              for row in amaxes]  # fmt: skip
    scales = np.array(scales, F32)
    with np.errstate(divide="ignore"):
        inverse = np.minimum(F32(1) / (scales * s_dec), np.finfo(F32).max)
    codes = nearest_codes(np.abs(x) * inverse.repeat(16, 1), E2M1)
    expected = np.sign(x) * GRIDS["e2m1"][codes] * scales.repeat(16, 1) * s_dec
    q = quantizer(kind)(torch.from_numpy(x))
    np.testing.assert_array_equal(q.scales.float().numpy(), scales)
    np.testing.assert_array_equal(q.dequantize().numpy(), expected.astype(F32))


@pytest.mark.parametrize(
    ("kind", "nearest", "stochastic"),
    [("e4m3", 20.44, 17.24), ("foldable", 19.90, 16.88), ("foldable-up", 18.63, 15.80)],
)
def test_signal_to_noise_ratio_of_gaussian_numbers(kind, nearest, stochastic):
    """The figures of a simulation in float64 by others, in dB; ours have a spread of 0.01."""
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    for rounding, expected in zip(Rounding, (nearest, stochastic), strict=True):
        error = quantizer(kind, rounding)(x, draw=Draw(1)).dequantize() - x
        ratio = 10 * torch.log10(x.square().mean() / error.square().mean()).item()
        assert abs(ratio - expected) < 0.04


def test_every_product_of_code_and_scale_is_an_fp8_number():
    """Down to E4M3's normal range: 2**-6 / fold_scale."""
    format = FORMATS["nvfp4"].with_options(block_scales="foldable")
    codes = torch.from_numpy(GRIDS["e2m1"]).float()
    products = (codes[:, None] * torch.from_numpy(ALLOWED).float()).flatten()
    target = folded_format(format, left=True, partner=format)
    assert fold_scale(format, target) == 2.0**-3 and target.name == "fp8-tensor-e4m3"
    folded = products * fold_scale(format, target)
    exact = folded.to(torch.float8_e4m3fn).float() == folded
    assert folded.max() == 288 and exact[folded >= 2.0**-6].all()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d"])
def test_folding(name):
    """A tensor of like magnitudes folds without a change."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    q = quantizer("foldable", name=name)(x)
    folded = fold(q)
    assert folded.codes.dtype == torch.float8_e4m3fn and folded.scales.numel() == 0
    assert torch.equal(folded.dequantize(), q.dequantize())
