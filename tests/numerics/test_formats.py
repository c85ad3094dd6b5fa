"""Grids, rounding, codes and packing, against values built from the bit layouts."""

import itertools
from fractions import Fraction

import pytest
import torch

from megatron_lowbit.numerics.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    decode,
    decode_e8m0,
    encode,
    grid_to_codes,
    pack_nibbles,
    round_to_grid,
    unpack_nibbles,
)
from tests.numerics.conftest import GRIDS

ALL = (E2M1, E2M3, E3M2, E4M3, E5M2)


def grid_of(format) -> list[Fraction]:
    """Return every finite magnitude, in code order."""
    return [Fraction(value) for value in GRIDS[format.name]]


def fp32(values) -> torch.Tensor:
    """Return exact values as FP32; fails where FP32 cannot hold one."""
    tensor = torch.tensor([float(v) for v in values], dtype=torch.float64)
    assert torch.equal(tensor.float().double(), tensor)
    return tensor.float()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_grid_of_is_the_standards():
    """The tests' own enumeration against the numbers the OCP documents print."""
    assert [float(v) for v in grid_of(E2M1)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    largest = {"e2m1": 6, "e2m3": 7.5, "e3m2": 28, "e4m3": 448, "e5m2": 57344}
    smallest = {"e2m1": 0.5, "e2m3": 2**-3, "e3m2": 2**-4, "e4m3": 2**-9, "e5m2": 2**-16}
    for format in ALL:
        grid = grid_of(format)
        assert (grid[-1], grid[1]) == (largest[format.name], smallest[format.name])


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_fields_of_the_format(format):
    grid = grid_of(format)
    assert format.max == grid[-1]
    assert format.min_normal == grid[2**format.mantissa_bits]
    assert format.bits == 1 + format.exponent_bits + format.mantissa_bits
    steps = [high - low for low, high in itertools.pairwise(grid)]
    widens = [
        grid[i + 1] for i in range(len(steps) - 1) if steps[i + 1] == 2 * steps[i]
    ]  # the grid values from which on the step doubles
    assert [Fraction(edge) for edge in format.binade_edges if edge < format.max] == widens


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_grid_values_do_not_move(format):
    grid = fp32(grid_of(format))
    for x in (grid, -grid):
        assert same_bits(round_to_grid(x, format), x)
        for u in (0.0, 1 - 2**-24):
            uniform = torch.full_like(x, u)
            assert same_bits(round_to_grid(x, format, uniform), x)


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_nearest_at_and_beside_every_midpoint(format):
    grid = grid_of(format)
    pairs = list(itertools.pairwise(grid))
    middle = fp32([(low + high) / 2 for low, high in pairs])
    low, high = fp32(grid[:-1]), fp32(grid[1:])
    even = torch.where(torch.arange(len(pairs)) % 2 == 0, low, high)  # the even code
    below = torch.nextafter(middle, low)
    above = torch.nextafter(middle, high)
    for sign in (1.0, -1.0):
        for x, expected in ((middle, even), (below, low), (above, high)):
            assert same_bits(round_to_grid(sign * x, format), sign * expected)


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_saturation_zero_and_nan(format):
    big = torch.tensor([format.max * 1.01, 1e38, torch.inf])
    for uniform in (None, torch.zeros_like(big)):
        for sign in (1.0, -1.0):
            rounded = round_to_grid(sign * big, format, uniform)
            assert torch.equal(rounded, torch.full_like(big, sign * format.max))
        zero = torch.tensor([0.0, -0.0, torch.nan])
        rounded = round_to_grid(zero, format, None if uniform is None else zero.abs())
        assert same_bits(rounded[:2], zero[:2])
        assert rounded[2].isnan()
    tiny = torch.tensor([-1e-45, 1e-45])
    assert same_bits(round_to_grid(tiny, format), torch.tensor([-0.0, 0.0]))


@pytest.mark.parametrize("format, dtype", [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_fp8_grids_agree_with_torchs_cast(format, dtype):
    """Every bf16 value in range: torch's float8 casts are an independent implementation."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).float()
    x = x[x.abs() <= format.max]
    assert len(x) > 30000
    assert same_bits(round_to_grid(x, format), x.to(dtype).float())


def test_stochastic_goes_up_iff_uniform_is_below_the_fraction():
    """Exact at the border: u one step of 2**-24 below the fraction goes up, u at it goes down."""
    grid = grid_of(E2M1)
    generator = torch.Generator().manual_seed(1)
    for low, high in itertools.pairwise(grid):
        # Fractions k / 2**20: x is then exact in FP32 in each of these intervals.
        numerator = torch.randint(1, 2**20, (2000,), generator=generator)
        x = fp32([low + (high - low) * Fraction(int(k), 2**20) for k in numerator])
        fraction = numerator.double() / 2**20
        for sign in (1.0, -1.0):
            for u, expected in ((fraction, low), (fraction - 2**-24, high), (0 * fraction, high)):
                rounded = round_to_grid(sign * x, E2M1, u.float())
                assert torch.equal(rounded, torch.full_like(x, sign * float(expected)))


@pytest.mark.parametrize("format", (E2M1, E2M3, E3M2))
def test_codes_enumerate_the_grid(format):
    values = [float(v) for v in grid_of(format)]
    values += [-v for v in values]  # -0.0 has the first code with a sign
    codes = torch.arange(2**format.bits, dtype=torch.uint8)
    assert torch.equal(grid_to_codes(torch.tensor(values), format), codes)
    assert same_bits(decode(codes, format), torch.tensor(values))
    assert grid_to_codes(torch.tensor([torch.nan]), format).tolist() == [0]


@pytest.mark.parametrize("format", (E4M3, E5M2))
def test_fp8_codes_enumerate_the_grid_and_saturate(format):
    grid = fp32(grid_of(format))
    largest = len(grid) - 1
    assert encode(grid, format).view(torch.uint8).tolist() == list(range(len(grid)))
    assert encode(-grid, format).view(torch.uint8).tolist() == [128 + c for c in range(len(grid))]
    beyond = torch.tensor([1.01, 1.04, 1.2, torch.inf]) * format.max
    assert encode(beyond, format).view(torch.uint8).tolist() == [largest] * 4
    assert encode(-beyond, format).view(torch.uint8).tolist() == [128 + largest] * 4
    assert encode(torch.tensor([torch.nan]), format).float().isnan().all()
    assert same_bits(decode(encode(grid, format), format), grid)


def test_nibbles_even_element_low():
    codes = torch.tensor([[0x1, 0xF, 0x8, 0x0], [0xA, 0x5, 0x0, 0xF]], dtype=torch.uint8)
    packed = torch.tensor([[0xF1, 0x08], [0x5A, 0xF0]], dtype=torch.uint8)
    assert torch.equal(pack_nibbles(codes), packed)
    assert torch.equal(unpack_nibbles(packed), codes)
    every = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    expected = (every[:, 0] + 16 * every[:, 1]).unsqueeze(1)
    assert torch.equal(pack_nibbles(every), expected)
    assert torch.equal(unpack_nibbles(expected), every)
    strided = every.t().contiguous().t()
    assert torch.equal(pack_nibbles(strided), expected)


def test_e8m0():
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e8m0(codes)
    assert values[:255].double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert values[255].isnan() and values[:255].isfinite().all()
