"""Device functions: the block random Hadamard transform, as ``numerics/hadamard.py`` says.

A butterfly over distances 1, 2, 4, ...: the order of the FP32 sums is the reference's. In registers
that is log2(size) additions a value, and the same bits: a tensor core's product would differ, and
its accumulators would have to be spread over threads again. ``signs`` (int64) is the Philox key of
DRAWN_SIGNS.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import bf16_pair, bf16_values
from megatron_lowbit.kernels.random_words import philox

NO_SIGNS = tl.constexpr(0)
FIXED_SIGNS = tl.constexpr(1)
DRAWN_SIGNS = tl.constexpr(2)
MAX_LANES = tl.constexpr(128)
"""Elements of the longest transform that a thread holds, and a tile in both directions."""


class Transform(NamedTuple):
    """A transform as a constexpr: 2 to 256 elements, ``factor`` 1 / sqrt(size).

    ``minus``, of FIXED_SIGNS: bits that are set where a sign is minus.
    """

    size: int
    signs: int
    minus: int
    factor: float
    to_bf16: bool


@triton.jit
def _minus_words(key, H: tl.constexpr):
    """Draw the signs of a transform as words of 32 bits, set where a sign is minus."""
    QUADS: tl.constexpr = (H.size + 3) // 4
    quad = tl.arange(0, QUADS)
    s0, s1, s2, s3 = philox(key, quad, tl.full((QUADS,), H.size, tl.int32))
    four = (s0 >> 31) | (s1 >> 31) << 1 | (s2 >> 31) << 2 | (s3 >> 31) << 3
    four = four.to(tl.int32) << (quad % 8 * 4)
    words = ()
    for i in tl.static_range((QUADS + 7) // 8):
        words = words + (tl.sum(tl.where(quad // 8 == i, four, 0), 0),)
    return words


@triton.jit
def finish(y, H: tl.constexpr):
    """Scale the sums and, where the transform says so, round them to BF16."""
    y = y * H.factor
    if H.to_bf16:
        y = bf16_values(y)
    return y


@triton.jit
def transform_lanes(lanes, signs, N: tl.constexpr, H: tl.constexpr):
    """Transform lanes, a tuple of N tensors of one shape: one or several transforms."""
    sums = butterfly_lanes(lanes, signs, N, H)
    zs = ()
    for i in tl.static_range(0, N, 2):
        if H.to_bf16:
            zs = zs + bf16_pair(sums[i] * H.factor, sums[i + 1] * H.factor)
        else:
            zs = zs + (sums[i] * H.factor, sums[i + 1] * H.factor)
    return zs


@triton.jit
def butterfly_lanes(lanes, signs, N: tl.constexpr, H: tl.constexpr):
    """Compute only the sums of a transform, still to be finished."""
    ys = lanes
    if H.signs == DRAWN_SIGNS:
        ys = ()
        minus = _minus_words(signs, H)
        for i in tl.static_range(N):
            minus_bit = (minus[i % H.size // 32] << (31 - i % H.size % 32)) & -0x80000000
            # x - 0, or 0 - x: a zero keeps its sign or is positive.
            sign = (0x3F800000 | minus_bit).to(tl.float32, bitcast=True)
            zero = (minus_bit ^ -0x80000000).to(tl.float32, bitcast=True)
            ys = ys + (tl.fma(lanes[i], sign, zero),)
    elif H.signs == FIXED_SIGNS:
        ys = ()
        for i in tl.static_range(N):
            if (H.minus >> (i % H.size)) & 1:
                ys = ys + (-lanes[i],)
            else:
                ys = ys + (lanes[i],)
    for stage in tl.static_range(8):
        if (1 << stage) < H.size:
            ys = _butterfly_lanes(ys, N, 1 << stage)
    return ys


@triton.jit
def _butterfly_lanes(ys, N: tl.constexpr, DISTANCE: tl.constexpr):
    zs = ()
    for i in tl.static_range(N):
        if i & DISTANCE:
            zs = zs + (ys[i ^ DISTANCE] - ys[i],)
        else:
            zs = zs + (ys[i] + ys[i ^ DISTANCE],)
    return zs


@triton.jit
def transform_tile(x, signs, A: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """Transform [A, B] along its rows; B is a multiple of H.size."""
    N: tl.constexpr = H.size
    if H.signs != NO_SIGNS:
        if H.signs == FIXED_SIGNS:
            minus = ((H.minus >> tl.arange(0, N)) & 1) != 0
        else:
            QUADS: tl.constexpr = (N + 3) // 4
            w0, w1, w2, w3 = philox(signs, tl.arange(0, QUADS), tl.full((QUADS,), N, tl.int32))
            if N == 2:
                words = tl.reshape(tl.join(w0, w1), (N,))
            else:
                words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (N,))
            minus = (words >> 31) != 0
        tiles = tl.reshape(x, (A * (B // N), N))
        x = tl.reshape(tl.where(minus[None, :], -tiles, tiles), (A, B))
    for stage in tl.static_range(8):
        if (1 << stage) < N:
            x = _butterfly_tile(x, A, B, 1 << stage)
    return finish(x, H)


@triton.jit
def _butterfly_tile(x, A: tl.constexpr, B: tl.constexpr, DISTANCE: tl.constexpr):
    pairs = tl.reshape(x, (A, B // (2 * DISTANCE), 2, DISTANCE))
    low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    both = tl.join(low + high, low - high)
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (A, B))
