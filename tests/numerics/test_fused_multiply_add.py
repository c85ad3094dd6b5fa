"""Fused multiply-add against the C library's, which rounds once."""

import ctypes
import ctypes.util

import numpy as np
import torch

from megatron_lowbit.numerics.block_formats.ms_eden import fused_multiply_add

fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float


def expected(*numbers: torch.Tensor) -> np.ndarray:
    return np.array([fmaf(*own) for own in zip(*(n.tolist() for n in numbers), strict=True)], "f4")


def check(*numbers: torch.Tensor) -> None:
    np.testing.assert_array_equal(fused_multiply_add(*numbers).numpy(), expected(*numbers))


def test_numbers_of_many_magnitudes():
    """Sums that cancel, subnormals, overflow."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = torch.randn(3, 20_000, generator=generator)
    exponents = torch.randint(-100, 100, (3, 20_000), generator=generator)
    check(*(torch.ldexp(x, e) for x, e in zip((a, b, c), exponents, strict=True)))
    check(a, b, -a * b)
    check(a * 2.0**-75, b * 2.0**-70, c * 2.0**-140)


def test_numbers_that_round_twice_in_fp64():
    """A sum so near the middle of two FP32 numbers that FP64 equals the middle."""
    one = torch.tensor([1.0, -1.0])
    half_ulp, less = one * (1 + 2.0**-23), one * 2.0**-80
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: a middle. c moves it by less than FP64's last bit.
    a = torch.tensor([1 + 2.0**-12] * 2)
    for c in (less, half_ulp * less, torch.zeros(2)):
        check(a, a, c)
    twice = (a.double() * a.double() + less.double()).float()
    assert (fused_multiply_add(a, a, less) != twice).any()


def test_what_is_not_finite():
    inf = torch.inf
    a, b, c = torch.tensor([[inf, 1.0], [inf, -inf], [torch.nan, 1.0], [3e38, 0.0], [0.0, inf]]).T[
        [0, 0, 1]
    ]
    check(a, b, c)
