"""MXNorm's constants against closed forms and draws, its estimate against RMSNorm, its bounds."""

import math

import pytest
import torch

from megatron_lowbit.numerics import FORMATS, Quantizer
from megatron_lowbit.numerics.block_formats.mx import MX
from megatron_lowbit.numerics.formats import ElementFormat
from megatron_lowbit.numerics.mxnorm import MXNorm, absmax_constant, mean_rounded, rms_of_rounded
from megatron_lowbit.numerics.rmsnorm import tree_sum
from tests.numerics.conftest import randn


def rms_norm(x):
    return x.double() / x.double().square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("p", [0.3, 0.5, 1, 1.5, 2, 3, 7.5])
def test_a_block_of_one_has_the_moments_of_the_normal_distribution(p):
    moment = 2 ** (p / 2) * math.gamma((p + 1) / 2) / math.sqrt(math.pi)
    assert absmax_constant(p, 1) == pytest.approx(moment ** (1 / p), rel=1e-9)


def test_a_block_of_two():
    # E[max(|X|, |Y|)] = 2 / sqrt(pi), E[max(X**2, Y**2)] = 1 + 2 / pi.
    assert absmax_constant(1, 2) == pytest.approx(2 / math.sqrt(math.pi), rel=1e-10)
    assert absmax_constant(2, 2) == pytest.approx(math.sqrt(1 + 2 / math.pi), rel=1e-10)


def test_the_papers_constants():
    assert 1 / absmax_constant(1, 16) == pytest.approx(0.4814, abs=1e-4)
    assert 1 / absmax_constant(2, 16) == pytest.approx(0.4688, abs=1e-4)
    # Bounds of 64 blocks, section 4.2; RMSNorm's is 32.
    assert 64 * absmax_constant(1, 16) == pytest.approx(132.95, abs=0.02)
    assert 8 * absmax_constant(2, 16) == pytest.approx(17.06, abs=0.01)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_constants_are_those_of_draws(p, block):
    powers = randn(40_000, block, seed=block).abs().amax(-1).double() ** p
    error = powers.std() / math.sqrt(len(powers))
    assert abs(powers.mean() - absmax_constant(p, block) ** p) < 4 * error


@pytest.mark.parametrize(("block", "hidden"), [(32, 1024), (16, 512), (128, 4096)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_fidelity_before_the_cast(block, hidden, scale):
    x = scale * randn(512, hidden)
    exact, seen = rms_norm(x), MXNorm(eps=0).normalize(x, block).double()
    residual = (seen - exact).square().sum() / exact.square().sum()
    assert 1 - residual >= 0.999


MXFP8 = FORMATS["mxfp8-e4m3"].with_options(scale_rounding="rceil")
INT2 = MX("int2", ElementFormat("int2", 1, 0, max=1.0, min_normal=1.0), 1)
"""-1, 0 and 1: conclusion."""


@pytest.mark.parametrize(
    ("format", "blocks", "least"),
    [(MXFP8, 32, 0.998), (MXFP8, 256, 0.999), (INT2, 32, 0.95), (INT2, 256, 0.98)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_fidelity_of_what_is_quantized(format, blocks, least):
    x, quantize = randn(256, 32 * blocks), Quantizer(format)
    exact = quantize(rms_norm(x).float()).dequantize().double()
    seen = quantize(MXNorm().normalize(x, 32)).dequantize().double()
    assert 1 - (seen - exact).square().sum() / exact.square().sum() >= least


@pytest.mark.parametrize("scale", [1e-2, 1.0, 100.0])
def test_distributions_of_scales_and_codes_are_those_of_rms_norm(scale):
    """The paper's figure 3, left and middle: at most 1% of either would have to move."""
    x = scale * randn(512, 1024)
    quantize = Quantizer(MXFP8)
    normalized = rms_norm(x).float()
    found, expected, other = map(
        quantize, (MXNorm().normalize(x, 32), normalized, 1.4 * normalized)
    )

    def distance(one, two):
        counts = (torch.bincount(t.view(torch.uint8).flatten().int(), minlength=256)
                  for t in (one, two))  # fmt: skip
        first, second = (count / count.sum() for count in counts)
        return (first - second).abs().sum() / 2

    for name in ("scales", "codes"):
        ours, theirs, others = (getattr(q, name) for q in (found, expected, other))
        assert distance(ours, theirs) < 0.01 < 0.02 < distance(others, theirs)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("outlier", [1.0, 1e3, 1e30])
def test_values_never_exceed_the_bound(p, outlier):
    x = randn(64, 512)
    x[:, 7] = outlier
    x[0] = 0
    x[0, 3] = outlier  # a single value attains it
    seen = MXNorm(p=p, eps=0).normalize(x, 32)
    bound = absmax_constant(p, 32) * 16 ** (1 / p)
    assert seen.abs().amax() <= bound * (1 + 1e-6)
    assert outlier > 1e20 or seen[0, 3] == pytest.approx(bound, rel=1e-6)


def test_zeros_stay_zeros():
    assert not MXNorm().normalize(torch.zeros(3, 64), 32).any()


@pytest.mark.parametrize("length", [1, 2, 3, 100, 128])
def test_sums_are_of_halves(length):
    values = randn(5, length).abs()
    exact = values.double().sum(-1)
    assert (tree_sum(values) - exact).abs().max() <= 8 * 2**-24 * exact.max()
    if length == 3:
        assert torch.equal(tree_sum(values), (values[:, 0] + values[:, 2]) + values[:, 1])


def test_rounded_means_are_those_of_draws():
    for sigma in (0.7, 1.0, 1.9):
        absmax = sigma * randn(40_000, 32, seed=1).abs().amax(-1).double()
        rounded = 2 ** absmax.log2().floor()
        error = rounded.std() / math.sqrt(len(rounded))
        assert abs(rounded.mean() - mean_rounded(sigma, 32)) < 4 * error
    assert mean_rounded(2.6, 16) == pytest.approx(2 * mean_rounded(1.3, 16), rel=1e-12)


def test_the_inverse_of_the_rounded_mean():
    for sigma in (1e-6, 0.31, 1.0, 1.7, 2.0, 1e5):
        mean = torch.tensor([mean_rounded(sigma, 32)], dtype=torch.float32)
        assert rms_of_rounded(mean, 32).item() == pytest.approx(sigma, rel=1e-4)
    assert rms_of_rounded(torch.zeros(1), 32).item() == 0


def test_the_estimate_from_rounded_scales():
    x = 5 * randn(256, 8192)
    seen = MXNorm(p=1, eps=0, rounded=True).inverse_rms(x, 32).squeeze(-1)
    ratio = seen * x.square().mean(-1).sqrt()
    assert abs(ratio.mean() - 1) < 5e-3 and ratio.std() < 0.05
    # Appendix K's search in FP64; the table's lines are within 2e-5 of it.
    rounded = 2 ** x.view(256, -1, 32).abs().amax(-1).double().log2().floor()
    for row in range(0, 256, 32):
        low, high = 1.0, 25.0
        for _ in range(50):
            middle = (low + high) / 2
            below = mean_rounded(middle, 32) < rounded[row].mean()
            low, high = (middle, high) if below else (low, middle)
        assert seen[row].item() == pytest.approx(1 / low, rel=5e-5)


@pytest.mark.parametrize("arguments", [{"p": 0}, {"p": math.inf}, {"p": 2, "rounded": True}])
def test_what_makes_no_sense_is_refused(arguments):
    with pytest.raises(ValueError, match="mxnorm"):
        MXNorm(**arguments)
    with pytest.raises(ValueError, match="whole blocks of 32, not 40"):
        MXNorm().inverse_rms(torch.ones(2, 40), 32)
