"""Device functions: reading tiles of a matrix, and writing tiles of it or of its transpose.

A matrix is read as one tensor, or as ``lanes``: a tuple of P tensors, one for each place in a
group of P neighbours along a column or along a row. Whatever goes together in a group, such as the
values of a block or of a transform, then stays within a thread. Where ``tokens`` (R,), int32, are
given, row r of the matrix is row ``tokens[r]`` of x.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    x, stride_r, stride_c, row0, col0, R, C,
    TM: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr, tokens=None,
):  # fmt: skip
    """Load x's tile at (row0, col0) in FP32, [TM, TN]; zeros outside of x."""
    return load_raw(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN, tokens).to(tl.float32)


@triton.jit
def load_raw(
    x, stride_r, stride_c, row0, col0, R, C,
    TM: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr, tokens=None,
):  # fmt: skip
    """Load the same tile in x's own dtype."""
    r, c = tl.arange(0, TM), tl.arange(0, TN)[None, :]
    at = _rows_at(x + _offset(col0, stride_c), stride_r, row0, r, R, tokens) + c * stride_c
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(row0 + r < R)[:, None] & (col0 + c < C), other=0.0)


@triton.jit
def load_column_lanes(
    x, stride_r, stride_c, row0, col0, R, C,
    TM: tl.constexpr, TN: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr, tokens=None,
):  # fmt: skip
    """Load the tile as P tensors [TM // P * TN], columns fastest; the i-th: rows i, i + P, ..."""
    index = tl.arange(0, TM // P * TN)
    r, c = index // TN * P, index % TN
    N: tl.constexpr = min(P, 16 if tokens is None else 8)
    lanes = _zeros(TM // P * TN, P)
    # Loops that carry the address. Where an operation makes it, Triton's coalescing walks all code
    # that is connected with the load, which takes longer than the rest of the compilation. A loop
    # of more steps, or one that goes on from another, would stay a loop: its lanes would pass
    # through local memory, which takes a hundred times as long.
    for first in tl.static_range(0, P, N):
        at = x + _offset(col0, stride_c) + c * stride_c
        if tokens is None:
            at += _offset(row0 + first, stride_r) + r * stride_r
        else:
            token, column = tokens + row0 + first + r, at
        for i in range(first, first + N):
            if tokens is not None:
                at = column + _offset(tl.load(token, mask=row0 + r + i < R, other=0), stride_r)
                token += 1
            if EVEN:
                lane = tl.load(at)
            else:
                inside = (row0 + r + i < R) & (col0 + c < C)
                lane = tl.load(at, mask=inside, other=0.0)
            lanes = lanes[1:] + (lane.to(tl.float32),)
            if tokens is None:
                at += stride_r
    return lanes


@triton.jit
def load_row_lanes(
    x, stride_r, stride_c, row0, col0, R, C,
    TM: tl.constexpr, TN: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr, tokens=None,
):  # fmt: skip
    """Load the tile as P tensors [TM * TN // P], rows slowest; the i-th: columns i, i + P, ..."""
    N: tl.constexpr = TM * TN // P
    index = tl.arange(0, N)
    r, c = index // (TN // P), (index % (TN // P) * P)[:, None] + tl.arange(0, 8)[None, :]
    at = _rows_at(x + _offset(col0, stride_c), stride_r, row0, r, R, tokens) + c * stride_c
    r, c = (row0 + r)[:, None], col0 + c
    lanes = _zeros(N, P)
    for i in range(0, P, 8):
        if EVEN:
            eight = tl.load(at)
        else:
            eight = tl.load(at, mask=(r < R) & (c + i < C), other=0.0)
        even, odd = tl.split(tl.reshape(eight.to(tl.float32), (N, 4, 2)))
        p04, p26 = tl.split(tl.reshape(even, (N, 2, 2)))
        p15, p37 = tl.split(tl.reshape(odd, (N, 2, 2)))
        p0, p4 = tl.split(p04)
        p1, p5 = tl.split(p15)
        p2, p6 = tl.split(p26)
        p3, p7 = tl.split(p37)
        lanes = lanes[8:] + (p0, p1, p2, p3, p4, p5, p6, p7)
        at += 8 * stride_c
    return lanes


@triton.jit
def _rows_at(x, stride_r, row0, r, R, tokens):
    """Return the addresses [N, 1] of rows row0 + r [N]."""
    if tokens is None:
        return x + _offset(row0, stride_r) + r[:, None] * stride_r
    else:
        rows = tl.load(tokens + row0 + r, mask=row0 + r < R, other=0)
        return x + _offset(rows, stride_r)[:, None]


@triton.jit
def _zeros(N: tl.constexpr, P: tl.constexpr):
    """Return P tensors [N] of zeros."""
    lanes = ()
    for _ in tl.static_range(P):
        lanes = lanes + (tl.zeros((N,), tl.float32),)
    return lanes


@triton.jit
def side_by_side(lanes, N: tl.constexpr):
    """Join N tensors [A], N a power of two, into one [A, N]."""
    if N == 1:
        return lanes[0][:, None]
    else:
        evens, odds = (), ()
        for i in tl.static_range(0, N, 2):
            evens = evens + (lanes[i],)
            odds = odds + (lanes[i + 1],)
        pairs = tl.join(side_by_side(evens, N // 2), side_by_side(odds, N // 2))
        return tl.reshape(pairs, (lanes[0].shape[0], N))


@triton.jit
def apart(x, N: tl.constexpr):
    """Split [A, N], N a power of two, into N tensors [A]: what :func:`side_by_side` joins."""
    A: tl.constexpr = x.shape[0]
    if N == 1:
        return (tl.reshape(x, (A,)),)
    else:
        even, odd = tl.split(tl.reshape(x, (A, N // 2, 2)))
        evens, odds = apart(even, N // 2), apart(odd, N // 2)
        lanes = ()
        for i in tl.static_range(N // 2):
            lanes = lanes + (evens[i], odds[i])
        return lanes


@triton.jit
def store_groups(base, groups, r, c, rows, columns, EVEN: tl.constexpr):
    """Write [A, N] to a contiguous matrix (rows, columns), group i to row r[i] from column c[i]."""
    c = c[:, None] + tl.arange(0, groups.shape[1])[None, :]
    at = base + r.to(tl.int64)[:, None] * columns + c
    groups = groups.to(base.dtype.element_ty)
    if EVEN:
        tl.store(at, groups)
    else:
        tl.store(at, groups, mask=(r < rows)[:, None] & (c < columns))


@triton.jit
def store_tile(base, tile, row0, col0, rows, columns, EVEN: tl.constexpr):
    """Write a tile [A, B] of a contiguous matrix (rows, columns)."""
    r, c = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
    at = base + (row0.to(tl.int64) * columns + col0) + (r * columns + c)
    tile = tile.to(base.dtype.element_ty)
    if EVEN:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(row0 + r < rows) & (col0 + c < columns))


@triton.jit
def _offset(first, stride):
    return first.to(tl.int64) * stride
