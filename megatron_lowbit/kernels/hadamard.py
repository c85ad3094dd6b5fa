"""Device functions: the block random Hadamard transform, as ``numerics/hadamard.py`` says.

A butterfly over distances 1, 2, 4, ...: the order of the FP32 sums is the reference's. ``signs`` is
an int64: with FIXED_SIGNS bits that are set where a sign is minus, with DRAWN_SIGNS a Philox key.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import bf16_values
from megatron_lowbit.kernels.random_words import philox

NO_SIGNS = tl.constexpr(0)
FIXED_SIGNS = tl.constexpr(1)
DRAWN_SIGNS = tl.constexpr(2)


class Transform(NamedTuple):
    """A transform as a constexpr: 4 to 256 points, ``factor`` 1 / sqrt(points)."""

    points: int
    signs: int
    factor: float
    to_bf16: bool


@triton.jit
def _sign_bits(signs, first: tl.constexpr, H: tl.constexpr):
    """The sign bits (int32) to flip of points first to first + 4."""
    if H.signs == FIXED_SIGNS:
        s0 = (signs >> first) & 1
        s1 = (signs >> (first + 1)) & 1
        s2 = (signs >> (first + 2)) & 1
        s3 = (signs >> (first + 3)) & 1
    else:
        quad = tl.full((), first // 4, tl.int32)
        s0, s1, s2, s3 = philox(signs, quad, tl.full((), H.points, tl.int32))
        s0, s1, s2, s3 = s0 >> 31, s1 >> 31, s2 >> 31, s3 >> 31
    return (
        s0.to(tl.int32) << 31,
        s1.to(tl.int32) << 31,
        s2.to(tl.int32) << 31,
        s3.to(tl.int32) << 31,
    )


@triton.jit
def _finish(y, H: tl.constexpr):
    y = y * H.factor
    if H.to_bf16:
        y = bf16_values(y)
    return y


@triton.jit
def transform_points(points, signs, N: tl.constexpr, H: tl.constexpr):
    """Points as a tuple of N tensors of one shape: one or several transforms."""
    ys = points
    if H.signs != NO_SIGNS:
        ys = ()
        for first in tl.static_range(0, N, 4):
            bits = _sign_bits(signs, first % H.points, H)
            for i in tl.static_range(4):
                flipped = points[first + i].to(tl.int32, bitcast=True) ^ bits[i]
                ys = ys + (flipped.to(tl.float32, bitcast=True),)
    for stage in tl.static_range(8):
        if (1 << stage) < H.points:
            ys = _butterfly_points(ys, N, 1 << stage)
    zs = ()
    for i in tl.static_range(N):
        zs = zs + (_finish(ys[i], H),)
    return zs


@triton.jit
def _butterfly_points(ys, N: tl.constexpr, DISTANCE: tl.constexpr):
    zs = ()
    for i in tl.static_range(N):
        if i & DISTANCE:
            zs = zs + (ys[i ^ DISTANCE] - ys[i],)
        else:
            zs = zs + (ys[i] + ys[i ^ DISTANCE],)
    return zs


@triton.jit
def transform_tile(x, signs, A: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """[A, B], transforms along its rows; B is a multiple of H.points."""
    N: tl.constexpr = H.points
    if H.signs != NO_SIGNS:
        if H.signs == FIXED_SIGNS:
            minus = ((signs >> tl.arange(0, N)) & 1) != 0
        else:
            row = tl.full((N // 4,), N, tl.int32)
            w0, w1, w2, w3 = philox(signs, tl.arange(0, N // 4), row)
            words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (N,))
            minus = (words >> 31) != 0
        tiles = tl.reshape(x, (A * (B // N), N))
        x = tl.reshape(tl.where(minus[None, :], -tiles, tiles), (A, B))
    for stage in tl.static_range(8):
        if (1 << stage) < N:
            x = _butterfly_tile(x, A, B, 1 << stage)
    return _finish(x, H)


@triton.jit
def _butterfly_tile(x, A: tl.constexpr, B: tl.constexpr, DISTANCE: tl.constexpr):
    pairs = tl.reshape(x, (A, B // (2 * DISTANCE), 2, DISTANCE))
    low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    both = tl.join(low + high, low - high)
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (A, B))
