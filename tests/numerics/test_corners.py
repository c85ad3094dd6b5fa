"""Every format at its corners: both ends of FP32, zeros, NaN, infinity, ragged, transposed."""

import itertools

import pytest
import torch

from megatron_lowbit.numerics import FORMATS, Draw, Quantizer, Rounding, format_by_name, quantize
from tests.marks import others_slow
from tests.numerics.conftest import assert_same, bits, randn

FLT_MAX = torch.finfo(torch.float32).max


def with_values(format, values):
    """Return a format with a value for each option; None where they exclude each other."""
    try:
        return format.with_options(**dict(zip(format.OPTIONS, values, strict=True)))
    except ValueError:
        return None


EVERY = [  # all options; square MX blocks differ from the others in their amax only
    made
    for format in FORMATS.values()
    for values in itertools.product(*format.OPTIONS.values())
    if not format.name.startswith("mx") or format.block_rows == 1 or values[0] != "ceil"
    if (made := with_values(format, values)) is not None
]
# An option at a time shows what it does, in one format of each kind of blocks.
SHOWN = ("mxfp4", "mxfp8-e4m3-2d", "fp8-1x128-e4m3", "fp8-128x128-e5m2", "fp8-tensor-e4m3")
PLAIN = [
    format
    for format in EVERY
    if not format.options
    or (len(format.options) == 1 and (format.name in SHOWN or format.name[:2] not in ("mx", "fp")))
]
SQUARE = [format for format in EVERY if format.square]
# Without a scale of the tensor, UE5M3 scales reach from 2**-17 to 114688.
ONE_LEVEL = [format for format in EVERY if "tensor_scaled" in format.options]
MX = [format for format in EVERY if format.name.startswith("mx")]


def test_what_is_covered():
    assert len(FORMATS) == 2 + 10 + 6 + 2 + 6 + 2
    assert {format.name for format in EVERY} == set(FORMATS)
    # NVFP4 with scales of rows; UE5M3, MS-EDEN, two, IF4
    rows, others = 4 * 2 * 2, 2 * 2 + 2 + 2 + 3 * 2
    nvfp4 = 2 + rows  # foldable, and as many without
    assert len(EVERY) == 2 * nvfp4 + rows + 2 * (5 * 8 + 5 * 6) + 4 * 4 * 2 + 2 * 2 + 2 + others + 2
    assert len(SQUARE) == nvfp4 + 2 * 5 * 6 + 2 * 4 * 2 + 2 * 2 + 2


@pytest.mark.parametrize("format", others_slow(EVERY, PLAIN), ids=str)
def test_zeros(format):
    x = torch.zeros(40, 300)
    x[3, 5] = x[20, 130] = -0.0
    q = Quantizer(format)(x)
    signed = x if format.element.name != "int4" else x.abs()  # integers have no -0
    assert torch.equal(bits(q.dequantize()), bits(signed))
    if format in MX:
        assert (q.scales == 0).all()
    elif format.row_scaled:
        assert (q.scales.float() == 0).all() and (q.tensor_scale == 1).all()
    elif format.name.startswith("fp8"):
        assert (q.scales == 1).all() and q.tensor_scale == 1
    x[:, 256:] = 1.0  # zero blocks beside others
    q = Quantizer(format)(x)
    assert torch.equal(q.dequantize()[:, :256], x[:, :256])
    torch.testing.assert_close(q.dequantize()[:, 256:], x[:, 256:], rtol=0.26, atol=0)


def largest_error(format) -> float:
    """Bound an element's error, as a share of its block's amax: half a step, or a clip.

    The scale may be larger than need be: twice (MX, pow2) or, for NVFP4, a half step of E4M3,
    1/16, which it may also be too small.
    """
    element = format.element
    widest = 2.0 ** (element.max_exponent - element.mantissa_bits)
    rounding = 2.0**-20  # of FP32, several times
    if format in MX:
        margin = 0.75 if format.three_quarters else 1.0
        if format.scale_rounding in ("ceil", "rceil"):
            return widest / element.max / margin + rounding
        top = 2.0 ** (element.max_exponent + 1) * margin
        return max(widest / top, 1 - min(element.max / top, 1)) + rounding
    share = widest / 2 / element.max
    if format.options.get("selection") == "abs_max":  # no more than integers up to 7
        share = 1 / 2 / 7
    if format.name == "ms-eden":  # its scale is rounded twice, once to either neighbour
        return share * (1 + 3 / 16) + 3 / 16
    if format.element.bits == 4:
        return share * (1 + 1 / 16) + 1 / 16
    return share * (2 if format.options.get("scale_format") == "pow2" else 1) + rounding


@pytest.mark.parametrize("format", others_slow(EVERY, PLAIN), ids=str)
def test_error_of_dequantization(format):
    """Each element within half a step of its block's scale, and a third of that is met."""
    x = randn(256, 384, seed=99) * (1.0 if format in ONE_LEVEL else 1e-30)
    if not format.tensor_scaled and format not in ONE_LEVEL:
        x[128:] = x[128:] * 1e30 * 1e30
    q = Quantizer(format)(x)
    error = (q.dequantize().double() - x.double()).abs()
    if format.name.startswith("fp8-tensor"):
        amax = x.abs().max().double()
    else:
        rows, columns = format.block_rows, 384 if format.block == 1 else format.block
        amax = x.abs().view(256 // rows, rows, 384 // columns, columns).amax(-1).amax(1).double()
        amax = amax.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    bound = largest_error(format)
    assert (error <= bound * amax).all()
    assert (error / amax).max() > bound / 3
    assert (q.dequantize() * x >= 0).all()


@pytest.mark.parametrize("format", others_slow(EVERY, PLAIN), ids=str)
def test_both_ends_of_fp32(format):
    """Nothing becomes NaN; the largest element keeps its sign and, above underflow, its size."""
    for amax in (1e-45, 1e-42, 1.1754942e-38, 1e-30, 1e30, 2e38, FLT_MAX):
        check_amax(format, amax)


def check_amax(format, amax):
    x = torch.zeros(32, 256)
    x[:, ::7] = amax
    x[3, ::14] = -amax
    q = Quantizer(format)(x)
    values = q.dequantize()
    assert not values.isnan().any()
    assert q.tensor_scale.isfinite().all() and (q.tensor_scale > 0).all()
    assert (values * x >= 0).all() and torch.equal(values[x == 0], x[x == 0])
    scales = q.scales.float()
    assert scales.isfinite().all() and (scales != 255).all()
    ratio = (values[x != 0] / x[x != 0]).double()
    if format in ONE_LEVEL:
        assert (ratio == 0).all() or (amax > 1e29 and (values.abs().amax() == 6 * 114688))
    elif amax >= 1e-30:
        assert (ratio > 0.7).all()
        # A decode scale above FP32's largest divided by max may overflow by a rounding.
        assert (ratio < 1.5).all() or amax == FLT_MAX
    elif format in MX:  # 2**-127 times the smallest element is the least that is kept
        smallest = format.element.min_normal * 2.0**-format.element.mantissa_bits * 2.0**-127
        assert (ratio == 0).all() == (
            amax <= smallest * (0.5 if not format.three_quarters else 2 / 3)
        )


# Options change scales, which are made before codes are rounded.
ROUNDED = [
    pytest.param(f, rounding, marks=[pytest.mark.slow] * (f not in PLAIN))
    for rounding, formats in (
        (Rounding.NEAREST_EVEN, EVERY),
        (Rounding.STOCHASTIC, FORMATS.values()),
    )
    for f in formats
]


@pytest.mark.parametrize(("format", "rounding"), ROUNDED, ids=str)
def test_an_infinity_or_nan_makes_nan_of_what_shares_its_scale(format, rounding):
    """NaN of its block, or of the whole tensor; the other blocks keep their bits."""
    x = randn(160, 384, seed=7)
    draw = Draw(1) if rounding is Rounding.STOCHASTIC else None
    finite = Quantizer(format, rounding)(x, draw=draw)
    spoilt = torch.ones(160, 384, dtype=torch.bool)
    if not format.tensor_scaled:
        spoilt[:] = False
        block = 384 if format.row_scaled else format.block
        row, column = 40 // format.block_rows, 140 // block
        spoilt[row * format.block_rows :][: format.block_rows, column * block :][:, :block] = True
    for value in (torch.nan, torch.inf, -torch.inf):
        x[40, 140] = value
        values = Quantizer(format, rounding)(x, draw=draw).dequantize()
        assert torch.equal(values.isnan(), spoilt)
        assert torch.equal(values[~spoilt], finite.dequantize()[~spoilt])


@pytest.mark.parametrize("format", others_slow(EVERY, PLAIN), ids=str)
@pytest.mark.parametrize("rows, columns", [(1, 1), (130, 257)])
def test_ragged_is_the_zero_padded_tensor_sliced(format, rows, columns):
    shape = rows, columns
    x = randn(*shape, seed=columns)
    padded = torch.nn.functional.pad(x, (0, -columns % format.block, 0, -rows % format.block_rows))
    ragged, whole = Quantizer(format)(x), Quantizer(format)(padded)
    assert ragged.shape == shape
    assert torch.equal(bits(ragged.codes), bits(whole.codes[:rows]))
    assert torch.equal(bits(ragged.scales), bits(whole.scales[:rows]))
    assert torch.equal(ragged.tensor_scale, whole.tensor_scale)
    assert torch.equal(ragged.dequantize(), whole.dequantize()[:rows, :columns])


# Sums of a transposed block have another order, and may decide a near tie otherwise.
WITHOUT_SUMS = [f for f in SQUARE if f.options.get("four_over_six", "abs_max") == "abs_max"]


@pytest.mark.parametrize("format", others_slow(WITHOUT_SUMS, PLAIN), ids=str)
@pytest.mark.parametrize("shape", [(128, 256), (5, 17), (130, 257)])
def test_square_blocks_transpose_to_the_quantized_transpose(format, shape):
    """Same codes, same scales, same layout, and back again."""
    x = randn(*shape, seed=3) * torch.exp2(randn(*shape, seed=4) * 5)
    q = Quantizer(format)(x)
    assert_same(q.transpose(), Quantizer(format)(x.t()))
    assert torch.equal(q.transpose().dequantize(), q.dequantize().t())
    assert_same(q.transpose().transpose(), q)


@pytest.mark.parametrize("format", [f.name for f in FORMATS.values() if not f.square])
def test_other_blocks_do_not_transpose(format):
    with pytest.raises(ValueError, match=f"{format} has no square blocks"):
        quantize(torch.ones(16, 16), format).transpose()


ONE_SCALE = [f for f in EVERY if f.block_rows > 1 and "four_over_six" not in f.options]


@pytest.mark.parametrize("format", others_slow(ONE_SCALE, PLAIN), ids=str)
def test_a_square_block_has_one_scale(format):
    """That of its largest element, wherever it is in the block: as one row of all its elements."""
    side = format.block
    x = randn(2 * side, 3 * side, seed=8)
    name = format.name.removesuffix("-2d").replace("fp8-128x128", "fp8-1x128")
    narrow = format_by_name(name, **format.options)
    q = Quantizer(format)(x)
    peak = x.abs().view(2, side, 3, side).amax(-1).amax(1)
    wide = peak.repeat_interleave(side, dim=1)
    expected = Quantizer(narrow)(wide).scales
    scales = q.scales if format.name.startswith("fp8") else q.scales[::side]
    assert torch.equal(bits(scales), bits(expected))
    if not format.name.startswith("fp8"):  # repeated for each row, as tensor cores read them
        assert torch.equal(bits(q.scales), bits(expected.repeat_interleave(side, dim=0)))


@pytest.mark.parametrize("format", others_slow(EVERY, PLAIN), ids=str)
def test_codes_do_not_depend_on_a_power_of_two(format):
    """Small tensors, 2**-98 and 2**-108: nothing underflows before it is scaled."""
    x = (randn(32, 256, seed=5) * 2.0**-100).clamp(-(2.0**-98), 2.0**-98)
    x[:, ::16] = 2.0**-98
    q, scaled = Quantizer(format)(x), Quantizer(format)(x * 2.0**-10)
    assert torch.equal(bits(q.codes), bits(scaled.codes))
    torch.testing.assert_close(scaled.dequantize() * 2.0**10, q.dequantize(), rtol=1e-6, atol=0)
