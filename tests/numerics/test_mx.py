"""MX formats bit for bit: torchao's golden vectors, torchao itself, and a scalar derivation."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx

from megatron_lowbit.numerics import FORMATS, Draw, Quantizer, Rounding, format_by_name, quantize
from tests.numerics.conftest import bytes_of, codes_of, nearest_codes

ROUNDINGS = ("floor", "rceil", "ceil", "even")
TORCHAO = {
    "mxfp4": torch.float4_e2m1fn_x2,
    "mxfp6-e2m3": DTYPE_FP6_E2M3,
    "mxfp6-e3m2": DTYPE_FP6_E3M2,
    "mxfp8-e4m3": torch.float8_e4m3fn,
    "mxfp8-e5m2": torch.float8_e5m2,
}
GOLDEN_FORMATS = {"mxfp4": "mxfp4", "mxfp8_e4m3": "mxfp8-e4m3", "mxfp8_e5m2": "mxfp8-e5m2"}
MIN_SUBNORMAL, FLT_MAX = 2.0**-149, float(torch.finfo(torch.float32).max)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("key", GOLDEN_FORMATS)
def test_golden(golden, golden_name, key, rounding):
    """All finite: no input of the golden file leaves a rule without an answer."""
    x, format = golden.x(golden_name), GOLDEN_FORMATS[key]
    arrays = f"{golden_name}/{key}_{rounding}"
    for source in (x, x.float(), x.t().contiguous().t()):
        q = quantize(source, format, scale_rounding=rounding)
        np.testing.assert_array_equal(bytes_of(q.codes), golden[f"{arrays}/codes"])
        np.testing.assert_array_equal(q.scales.numpy(), golden[f"{arrays}/scales_e8m0"])
        assert q.scales.dtype == torch.uint8 and q.tensor_scale == 1
    # Columnwise: as the transposed tensor, which torchao quantizes here.
    q = quantize(x, format, scale_rounding=rounding, axis=0)
    codes, scales = torchao_mx(x.t().contiguous(), format, rounding)
    np.testing.assert_array_equal(bytes_of(q.codes), codes)
    np.testing.assert_array_equal(q.scales.numpy(), scales)


def torchao_mx(x: torch.Tensor, format: str, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    scales, codes = to_mx(x, TORCHAO[format], 32, ScaleCalculationMode(rounding))
    return bytes_of(codes), bytes_of(scales)


def random_blocks(seed: int, rows: int = 96) -> torch.Tensor:
    """Draw rows of four blocks over the whole of FP32, some zero, subnormal or powers of two."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(-152, 129, (rows, 4, 1)) - rng.integers(0, 12, (rows, 4, 32))
    x = rng.choice([-1, 1], exponent.shape) * np.ldexp(rng.uniform(1, 2, exponent.shape), exponent)
    x[rng.random(x.shape) < 0.05] = 0
    x[rng.random((rows, 4)) < 0.05] = 0
    # Round amaxes: the largest element a power of two, or the largest of an element format.
    special = rng.random((rows, 4)) < 0.3
    values = rng.choice([1.0, 6.0, 7.5, 28.0, 448.0, 57344.0], (rows, 4))
    peak = np.ldexp(values, rng.integers(-145, 111, (rows, 4)))
    peak *= rng.choice([1.0, 1 + 2.0**-7, 1 - 2.0**-8], (rows, 4))
    small = np.minimum(np.abs(x), peak[..., None] * rng.uniform(0, 1, x.shape))
    x = np.where(special[..., None], np.copysign(small, x), x)
    x[..., 5] = np.where(special, peak, x[..., 5])
    x = np.clip(x, -FLT_MAX, FLT_MAX).astype(np.float32)
    return torch.from_numpy(x.reshape(rows, 128))


def log2_rounds_onto_an_integer(amax: np.ndarray, largest: float) -> np.ndarray:
    """Return True if torchao's RCEIL errs: its FP32 log2 of a quotient is exact there."""
    quotient = torch.from_numpy(amax) / torch.full((), largest)
    log2 = torch.log2(quotient)
    mantissa = np.frexp(quotient.numpy())[0]
    return ((log2 == log2.round()) & (quotient > 0)).numpy() & (mantissa != 0.5)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", TORCHAO)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), bf16=st.booleans())
def test_against_torchao(format, rounding, seed, bf16):
    """Equal scales, and equal codes but where the scale is 2**-127 (next tests)."""
    x = random_blocks(seed)
    x = x.bfloat16().clamp(-3.38e38, 3.38e38) if bf16 else x
    codes, scales = torchao_mx(x, format, rounding)
    q = quantize(x, format, scale_rounding=rounding)
    ours = q.scales.numpy()
    excluded = np.zeros(ours.shape, bool)
    if rounding == "rceil":
        amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1).numpy()
        excluded = log2_rounds_onto_an_integer(amax, FORMATS[format].element.max)
    np.testing.assert_array_equal(ours[~excluded], scales[~excluded])
    assert excluded.mean() < 0.1 and (ours == 0).mean() < 0.5
    blocks = codes.reshape(*ours.shape, -1)
    compared = (ours > 0) & ~excluded
    np.testing.assert_array_equal(
        bytes_of(q.codes).reshape(blocks.shape)[compared], blocks[compared]
    )


def test_torchao_rceil_errs_above_a_power_of_two():
    """log2(2**20 * (1 + 2**-22)) is 20 in FP32: torchao's scale is half of what does not clip."""
    x = torch.zeros(1, 32)
    x[0, 0] = 6 * 2.0**20 * (1 + 2.0**-21)
    _, scales = torchao_mx(x, "mxfp4", "rceil")
    q = quantize(x, "mxfp4", scale_rounding="rceil")
    assert scales.item() == 127 + 20 and q.scales.item() == 127 + 21
    assert log2_rounds_onto_an_integer(np.float32([x[0, 0]]), 6.0).all()
    assert not log2_rounds_onto_an_integer(np.float32([6 * 2.0**20, 5.0, 7.0, 0]), 6.0).any()


def exact_scale_byte(amax: np.float32, element, rounding: str) -> int:
    """Apply the rule to the exact value of amax; floor and ceil of log2 from the Fraction."""
    if amax == 0:
        return 0

    def floor_log2(value: Fraction) -> int:
        exponent = value.numerator.bit_length() - value.denominator.bit_length()
        return exponent - (value < Fraction(2) ** exponent)

    def ceil_log2(value: Fraction) -> int:
        exponent = floor_log2(value)
        return exponent + (value > Fraction(2) ** exponent)

    value = Fraction(float(amax))
    if rounding == "rceil":
        # FP32's quotient, as the rule is computed; its rounding matters to subnormals only.
        quotient = Fraction(float(np.float32(amax) / np.float32(element.max)))
        if quotient >= Fraction(2) ** -126:
            assert ceil_log2(value / Fraction(element.max)) == ceil_log2(quotient)
        exponent = -127 if quotient == 0 else ceil_log2(quotient)
    elif rounding == "ceil":
        exponent = ceil_log2(value) - int(math.log2(element.max))
    elif rounding == "even":
        step = Fraction(2) ** (max(floor_log2(value), -126) - element.mantissa_bits)
        rounded = (value / step + Fraction(1, 2)).__floor__() * step
        exponent = (floor_log2(rounded) if rounded else -127) - int(math.log2(element.max))
    else:
        exponent = floor_log2(value) - int(math.log2(element.max))
    return min(max(exponent, -127), 127) + 127


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("three_quarters, block", [(False, 32), (True, 32), (False, 16)])
@pytest.mark.parametrize("format", [name for name in FORMATS if name.startswith("mx")])
def test_against_scalars(format, rounding, three_quarters, block):
    """Both ends of FP32, subnormals, blocks of one row and square; float64 holds every product."""
    options = {"three_quarters": three_quarters, "block": block}
    f = format_by_name(format, scale_rounding=rounding, **options)
    assert f.block == block and f.block_rows in (1, block)
    x = random_blocks(11, rows=32 if f.block_rows == 1 else 192)
    q = Quantizer(f)(x)
    tiles = x.view(x.shape[0] // f.block_rows, f.block_rows, 128 // block, block).abs()
    amax = tiles.amax(-1).amax(1).numpy()
    scales = [exact_scale_byte(a, f.element, rounding) for a in amax.flatten()]
    scales = np.array(scales).reshape(amax.shape).repeat(f.block_rows, axis=0)
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    scaled = np.ldexp(x.double().numpy(), 127 - scales.repeat(block, axis=1))
    if three_quarters:
        scaled = (scaled * 0.75).astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(codes_of(q), nearest_codes(scaled, f.element))
    assert q.tensor_scale == np.float32(4 / 3 if three_quarters else 1)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", TORCHAO)
def test_scalar_rules_at_every_exponent(format, rounding):
    """amax next to each power of two, each maximum and each midpoint, for all exponents of FP32."""
    element = FORMATS[format].element
    values = []
    for exponent in range(-149, 128):
        for factor in (1, element.max, 2 - 2.0 ** -(element.mantissa_bits + 1)):
            value = np.float32(min(factor * 2.0**exponent, FLT_MAX))
            values += [np.nextafter(value, np.float32(0)), value]
            values += [np.nextafter(value, np.float32(FLT_MAX))]
    amax = np.array(values, np.float32)
    x = torch.zeros(len(amax), 32)
    x[:, 7] = -torch.from_numpy(amax)
    expected = [exact_scale_byte(a, element, rounding) for a in amax]
    assert min(expected) == 0 and max(expected) >= 238
    result = quantize(x, format, scale_rounding=rounding).scales[:, 0].tolist()
    assert result == expected


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", TORCHAO)
def test_what_clips(format, rounding):
    """CEIL and RCEIL never; FLOOR what lies above the largest element; 3/4 makes FLOOR safe."""
    element = FORMATS[format].element
    x = torch.zeros(1000, 32)
    x[:, 0] = torch.linspace(1, 2, 1001)[:-1]
    x[:, 0] = torch.nextafter(x[:, 0], torch.tensor(2.0))
    scaled = x[:, 0] / torch.exp2(quantize(x, format, scale_rounding=rounding).scales[:, 0] - 127.0)
    clipped = (scaled > element.max).float().mean().item()
    share = 2 - element.max / 2.0 ** int(math.log2(element.max))  # of [1, 2)
    if rounding in ("ceil", "rceil"):
        assert clipped == 0
    elif rounding == "floor":
        assert clipped == pytest.approx(share, abs=2e-3)
    else:  # from half a step of the mantissa below 2 on, EVEN takes the next exponent
        saved = 2.0 ** -(element.mantissa_bits + 1)
        assert clipped == pytest.approx(max(share - saved, 0), abs=2e-3)


@pytest.mark.parametrize(
    ("distribution", "share"),
    [
        (torch.distributions.Normal(0.0, 1.0), 0.0236),
        (torch.distributions.Laplace(0.0, 1.0), 0.0207),
        (torch.distributions.StudentT(5.0), 0.0190),
        (torch.distributions.StudentT(3.0), 0.0183),
        (torch.distributions.LogNormal(0.0, 1.0), 0.0174),
        (torch.distributions.Uniform(-0.5, 0.5), 0.25),
    ],
    ids=str,
)
def test_shares_that_floor_clips(distribution, share):
    """From 1.7% (log-normal) to 2.4% (Gaussian), a quarter of uniform numbers; 3% in the paper."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        x = distribution.sample((1024, 1024))
    scales = quantize(x, "mxfp4", scale_rounding="floor").scales.float() - 127
    beyond = x.view(1024, -1, 32).abs() > 6 * torch.exp2(scales)[..., None]
    assert beyond.float().mean().item() == pytest.approx(share, rel=0.03)


def test_a_scale_that_is_rounded_up_wastes_numbers():
    """The example of the NVFP4 paper, appendix B.4: an amax above 3 gets the scale 1 and is 3."""
    x = torch.zeros(1, 32)
    x[0, 0] = 3.01
    q = quantize(x, "mxfp4", scale_rounding="rceil")
    assert q.scales.item() == 127 and q.dequantize()[0, 0] == 3
    assert quantize(x, "nvfp4").dequantize()[0, 0].item() == pytest.approx(3.01)


@pytest.mark.parametrize("format", TORCHAO)
def test_three_quarters_never_clips(format):
    """Just below a power of two, the worst case, and over FP32: |v| stays within the element."""
    f = format_by_name(format, three_quarters=True)
    blocks = random_blocks(5, rows=2000).view(-1, 32)
    blocks[:2000, 3] = torch.nextafter(
        torch.exp2(torch.arange(2000) % 240 - 110.0), torch.zeros(())
    )
    blocks[:2000] = blocks[:2000].clamp(-blocks[:2000, 3:4], blocks[:2000, 3:4])
    scales = Quantizer(f)(blocks).scales.double() - 127
    v = blocks.abs().double() * torch.exp2(-scales) * 0.75
    assert v.max() < f.element.max
    assert (v / 0.75).max() > f.element.max  # without 3/4 the same blocks clip


def test_three_quarters_of_a_grid_value_never_moves():
    """1 is stored as 3, its scale 1/4, the tensor's 4/3: on the grid, so no draw changes it."""
    quantizer = Quantizer(format_by_name("mxfp4", three_quarters=True), Rounding.STOCHASTIC)
    q = quantizer(torch.ones(1, 32), draw=Draw(1))
    assert set(q.codes.flatten().tolist()) == {0x55} and q.scales.tolist() == [[125]]
    assert torch.equal(q.dequantize(), torch.ones(1, 32))
