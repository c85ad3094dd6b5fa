"""The Triton kernels against the reference arithmetic, bit for bit; in the interpreter on a CPU."""

from itertools import cycle, product

import pytest
import torch
import triton
import triton.language as tl

from megatron_lowbit.kernels.amaxes import tensor_amaxes
from megatron_lowbit.kernels.launch import quantize_both
from megatron_lowbit.kernels.operands import element
from megatron_lowbit.kernels.scales import mx_scales
from megatron_lowbit.kernels.support import kernel_of
from megatron_lowbit.numerics import (
    FORMATS,
    Draw,
    Hadamard,
    QuantizedTensor,
    Quantizer,
    Request,
    Rounding,
)
from megatron_lowbit.numerics import tensor_amaxes as reference_amaxes
from megatron_lowbit.numerics.block_formats.mx import MX
from tests.numerics.conftest import INPUTS, Golden

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "mxfp4 three quarters": ("mxfp4", {"three_quarters": True}),
    "mxfp8 rceil": ("mxfp8-e4m3", {"scale_rounding": "rceil"}),
    "mxfp8 ceil": ("mxfp8-e4m3", {"scale_rounding": "ceil"}),
    "mxfp8 even": ("mxfp8-e4m3", {"scale_rounding": "even"}),
    "fp8 pow2": ("fp8-1x128-e4m3", {"scale_format": "pow2"}),
    "fp8 1x64": ("fp8-1x128-e4m3", {"block": 64}),
    "fp8 64x64": ("fp8-128x128-e5m2", {"block": 64}),
    "fp8 1x16 pow2": ("fp8-1x128-e5m2", {"block": 16, "scale_format": "pow2"}),
    "fp8 32x32 pow2": ("fp8-128x128-e4m3", {"block": 32, "scale_format": "pow2"}),
    "nvfp4 foldable": ("nvfp4", {"block_scales": "foldable"}),
    "nvfp4 foldable-up": ("nvfp4", {"block_scales": "foldable-up"}),
    "ue5m3 one level": ("nvfp4-ue5m3", {"tensor_scaled": False}),
    "nvfp4 256": ("nvfp4", {"max_scale": 256}),
    "nvfp4 16/17": ("nvfp4", {"sixteen_seventeenths": True}),
    "nvfp4 mse": ("nvfp4", {"four_over_six": "mse", "max_scale": 256}),
    "nvfp4 mae": ("nvfp4", {"four_over_six": "mae"}),
    "nvfp4 abs_max 16/17": ("nvfp4", {"four_over_six": "abs_max", "sixteen_seventeenths": True}),
    "nvfp4-2d mse": ("nvfp4-2d", {"four_over_six": "mse"}),
    "nvfp4-2d abs_max": ("nvfp4-2d", {"four_over_six": "abs_max", "max_scale": 256}),
    "ms-eden torchao": ("ms-eden", {"arithmetic": "torchao"}),
    "nvfp4-2d 256 16/17": ("nvfp4-2d", {"max_scale": 256, "sixteen_seventeenths": True}),
    "nvfp4 rows": ("nvfp4", {"row_scaled": True}),
    "nvfp4 mae rows": ("nvfp4", {"four_over_six": "mae", "row_scaled": True}),
}  # fmt: skip
KERNELS = {name: format for name, format in FORMATS.items() if kernel_of(format)}
ALL = KERNELS | {name: FORMATS[f].with_options(**options) for name, (f, options) in OPTIONS.items()}
# The interpreter takes a second for a tile of 64 rows: there one of them, not whole, is enough.
RAGGED = (72 if DEVICE == "cuda" else 24, 200)
TRANSFORMS = (
    Hadamard(16), Hadamard(64, "fresh", "fp32"), Hadamard(128, 7), Hadamard(4, "none"),
    Hadamard(16, "fresh"), Hadamard(16, 7),  # two of them in a group of lanes
    Hadamard(2), Hadamard(2, "fresh"), Hadamard(2, 7),  # fewer signs than words of a draw
)  # fmt: skip


def values(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw many magnitudes, and a block of zeros."""
    generator = torch.Generator().manual_seed(rows)
    x, spread = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    x = (x * torch.exp(2 * spread)).to(dtype)
    x[0, :16] = 0
    return x


def check_same(made: QuantizedTensor, expected: QuantizedTensor) -> None:
    assert made.shape == expected.shape
    for name in ("codes", "scales", "tensor_scale"):
        mine, reference = getattr(made, name).cpu(), getattr(expected, name)
        assert (mine.dtype, mine.shape) == (reference.dtype, reference.shape)
        assert torch.equal(bits(mine), bits(reference)), name


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return bytes; all NaN alike: their sign and payload differ between devices."""
    if x.is_floating_point():
        x = torch.where(x.float().isnan(), torch.full_like(x, torch.nan), x)
    return x.flatten().contiguous().view(torch.uint8)


def check(x: torch.Tensor, quantizer: Quantizer, hadamard: Hadamard | None) -> None:
    """Check both sides, with random words of their own; the row side's from other row numbers."""
    draws = (None, None)
    if quantizer.rounding is Rounding.STOCHASTIC:
        draws = (Draw(2**63 + 12345, rows=3 * torch.arange(len(x))), Draw(77777777777))
    row, col = (Request(quantizer, hadamard, 5 + i, draws[i]) for i in range(2))
    by_row, by_col = quantize_both(x.to(DEVICE), row, col)
    check_same(by_row, quantizer(x, hadamard=hadamard, sign_key=5, draw=draws[0]))
    check_same(by_col, quantizer(x.t(), hadamard=hadamard, sign_key=6, draw=draws[1]))


# Options change how scales are made: whichever the rounding. Elements are rounded alike in blocks
# of one dimension and of two: to nearest in the latter, the other way in the former.
# Elements of MX formats are told apart in one dimension, and pairs of options option by option.
RARER = ("mxfp6-e2m3-2d", "mxfp6-e3m2-2d", "mxfp8-e5m2-2d", "fp8 1x16 pow2", "fp8 32x32 pow2",
         "nvfp4 abs_max 16/17", "nvfp4-2d 256 16/17")  # fmt: skip
QUICK = {
    (name, Rounding.NEAREST_EVEN if name in KERNELS and ALL[name].square else Rounding.STOCHASTIC)
    for name in ALL.keys() - RARER
}


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
        for case in product(ALL, Rounding)
    ],
)
def test_equals_the_reference(name, rounding):
    check(values(*RAGGED, torch.float32), Quantizer(ALL[name], rounding), None)


@triton.jit
def scale_bytes_kernel(amaxes, out, N: tl.constexpr, E: tl.constexpr, OPTIONS: tl.constexpr):
    at = tl.arange(0, N)
    byte, _, _, _ = mx_scales(tl.load(amaxes + at), 0.0, E, OPTIONS)
    tl.store(out + at, byte)


@pytest.mark.parametrize(
    "name", [name for name, format in KERNELS.items() if type(format) is MX and not format.square]
)
def test_scales_are_rounded_up_at_every_exponent(name):
    """Amaxes around each power of two times the largest magnitude, and all subnormal ones' ends."""
    format = FORMATS[name].with_options(scale_rounding="rceil")
    largest = torch.tensor(format.element.max).view(torch.int32).item() & 0x7FFFFF
    fractions = [largest - 1, largest, largest + 1, largest + 2, 0, 1, 0x7FFFFF, 0x400000]
    bits = (torch.arange(256)[:, None] << 23) + torch.tensor(fractions)
    amaxes = bits.to(torch.int32).flatten().view(torch.float32)
    out = torch.empty(len(amaxes), dtype=torch.int32, device=DEVICE)
    options = kernel_of(format).options
    scale_bytes_kernel[(1,)](amaxes.to(DEVICE), out, len(out), element(format.element), options)
    rows = torch.zeros(len(amaxes), format.block)
    rows[:, 3] = amaxes
    assert torch.equal(out.cpu(), Quantizer(format)(rows).scales.flatten().int())


TRANSFORMED = (
    "nvfp4", "mxfp4 three quarters", "mxfp6-e2m3", "fp8-1x128-e4m3", "fp8 64x64", "fp8-tensor-e5m2",
    "fp8-row-e4m3", "nvfp4-2d mse", "ms-eden", "ms-eden torchao", "nvfp4 rows", "nvfp4 mae rows",
    "tetrajet2",
)  # fmt: skip
# One transform for each format, and one format with them all.
ONE_EACH = {*zip(TRANSFORMED, cycle(TRANSFORMS), strict=False), *product(["nvfp4"], TRANSFORMS)}
if DEVICE == "cpu":  # in the interpreter size 128 takes longer than all others; a test has size 256
    ONE_EACH = {case for case in ONE_EACH if case[1].size < 128}


@pytest.mark.parametrize(
    ("name", "hadamard"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in ONE_EACH))
        for case in product(TRANSFORMED, TRANSFORMS)
    ],
    ids=str,
)
def test_with_a_transform(name, hadamard):
    check(values(*RAGGED, torch.bfloat16), Quantizer(ALL[name], Rounding.STOCHASTIC), hadamard)


@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4", "nvfp4 mse", "ms-eden", "fp8-row-e4m3", "nvfp4 rows"]
)
def test_with_the_largest_transform(name):
    """The sides are quantized apart: a tile of 256 x 256 would not fit into registers.

    In the interpreter, more than a tile for one format: the others walk them alike.
    """
    columns = 264 if DEVICE == "cuda" or name == "mxfp4" else 40
    x = values(264 if DEVICE == "cuda" else 8, columns, torch.bfloat16)
    check(x, Quantizer(ALL[name], Rounding.STOCHASTIC), Hadamard(256))


@pytest.mark.parametrize(
    "name", ["nvfp4", "fp8-128x128-e4m3", "fp8 64x64", "fp8 1x16 pow2", "mxfp4-2d", "fp8-row-e4m3",
             "nvfp4 rows"],
)  # fmt: skip
def test_whole_tiles_and_one_side(name):
    x, quantizer = values(128, 128, torch.bfloat16), Quantizer(ALL[name])
    by_row, by_col = quantize_both(x.to(DEVICE), Request(quantizer), None)
    check_same(by_row, quantizer(x))
    assert by_col is None
    by_row, by_col = quantize_both(x.to(DEVICE).t(), None, Request(quantizer))
    check_same(by_col, quantizer(x))


# Each scale function and each kernel; every format on a GPU. In make test, both values for
# NVFP4 and an MX format, and by turns for the others.
NOT_FINITE = ALL if DEVICE == "cuda" else [
    "nvfp4", "mxfp8 rceil", "fp8 pow2", "fp8-tensor-e4m3", "fp8-row-e4m3", "mxfp4 three quarters",
    "fp8-128x128-e5m2", "fp8 32x32 pow2", "nvfp4 16/17", "nvfp4 mse", "nvfp4-2d abs_max",
    "nvfp4-ue5m3", "ue5m3 one level", "quartet2", "ms-eden", "ms-eden torchao", "nvfp4 rows",
    "tetrajet2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(
            *case,
            marks=[pytest.mark.slow] * (DEVICE == "cpu" and number > 3 and number % 4 in (1, 2)),
        )
        for number, case in enumerate(product(NOT_FINITE, (torch.inf, torch.nan)))
    ],
)
def test_what_is_not_finite(name, value):
    x = values(*RAGGED, torch.float32)
    x[3, 5], x[3, 6] = value, -value
    check(x, Quantizer(ALL[name]), None)
    assert Quantizer(ALL[name])(x).dequantize().isnan().any()


@pytest.mark.parametrize(
    "name", ["nvfp4 16/17", "nvfp4 mse", "nvfp4-ue5m3", "ue5m3 one level", "quartet2", "ms-eden",
             "ms-eden torchao", "tetrajet2"],
)  # fmt: skip
@pytest.mark.parametrize("amax", [2.0**-140, 2.0**126])
def test_tensors_at_the_ends_of_fp32(name, amax):
    """Scales and errors that are subnormal, saturate or overflow."""
    x = values(24, 64, torch.float32)
    check(x * (amax / x.abs().amax()), Quantizer(ALL[name]), None)


@pytest.mark.parametrize("name", ["fp8-row-e4m3", "nvfp4 rows", "nvfp4 mae rows"])
def test_rows_and_columns_of_every_magnitude(name):
    """Scales down to 0 and reciprocals beyond FP32, on both sides, next to rows of zeros."""
    exponents = torch.arange(-149, 128).repeat_interleave(11)[: 40 * 70].view(40, 70)
    x = torch.ldexp(torch.ones(40, 70), exponents)
    x[3], x[:, 5] = 0, 0
    for matrix in (x, x.t()):
        check(matrix, Quantizer(ALL[name]), None)


@pytest.mark.parametrize("names", [("fp8-row-e4m3", "fp8-tensor-e4m3"), ("nvfp4 rows", "nvfp4")])
def test_a_scale_for_the_tensor_beside_one_a_row(names):
    x = values(*RAGGED, torch.bfloat16)
    quantizers = [Quantizer(ALL[name]) for name in names]
    for row, col in (quantizers, quantizers[::-1]):
        sides = Request(row), Request(col, Hadamard(16))
        by_row, by_col = quantize_both(x.to(DEVICE), *sides)
        check_same(by_row, row(x))
        check_same(by_col, col(x.t(), hadamard=Hadamard(16)))
        for seen, expected in zip(
            tensor_amaxes(x.to(DEVICE), *sides), reference_amaxes(x, *sides), strict=True
        ):
            assert seen is expected or seen.cpu() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("hadamard", [None, Hadamard(16)], ids=str)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("case", INPUTS)
def test_golden_inputs(case, name, hadamard):
    """Ties, tiny, huge and whatever else the reference is itself held to others' results on."""
    check(Golden().x(case), Quantizer(ALL[name]), hadamard)


def test_the_amax_that_makes_the_scale_may_be_another():
    x, quantizer = values(32, 64, torch.float32).clamp(-50, 50), Quantizer(FORMATS["nvfp4"])
    amax = 2 * x.abs().amax()
    for sides, turned in (((0, None), x), ((None, 0), x.t())):
        requests = [None if side is None else Request(quantizer) for side in sides]
        amaxes = (amax.to(DEVICE), amax.to(DEVICE))
        made = quantize_both(x.to(DEVICE), *requests, amaxes)
        check_same(next(filter(None, made)), quantizer(turned, amax))


def test_no_elements():
    x, quantizer = torch.zeros(0, 64), Quantizer(FORMATS["mxfp4"])
    check_same(quantize_both(x.to(DEVICE), Request(quantizer), None)[0], quantizer(x))


def test_stochastic_rounding_needs_to_know_its_words():
    quantizer = Quantizer(FORMATS["mxfp4"], Rounding.STOCHASTIC)
    with pytest.raises(ValueError, match="needs a Draw"):
        quantize_both(torch.ones(32, 32, device=DEVICE), Request(quantizer), None)
