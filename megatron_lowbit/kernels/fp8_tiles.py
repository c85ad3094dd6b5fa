"""FP8 tiles of 128 on a GPU: a matrix and its transpose from one read, rounded to nearest.

A program takes 128 x 128 elements as eight tensors [32, 64]: of every fourth row the even columns
and the odd ones. Two codes of a row are then made by one cast, and four of a column make one word
of the transpose, which is four times less to move between threads.
"""

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import code_pair, fold_ratio, join_pairs, larger
from megatron_lowbit.kernels.scales import fp8_tile_scales
from megatron_lowbit.kernels.tiles import load_raw

TILE = tl.constexpr(128)


@triton.jit
def fp8_tiles_kernel(
    x, stride_r, stride_c, R, C, amax, r_codes, r_scales, c_codes, c_scales,
    r_tensor_scale, c_tensor_scale, r_columns, c_columns,
    ROW: tl.constexpr, COL: tl.constexpr, E: tl.constexpr, OPTIONS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize x (R, C) and its transpose.

    ROW and COL are rows of a tile, 1 or 128, or 0 for a side that is not wanted. ``columns`` are
    the lengths of their rows of codes. r_codes points to int16, two codes each, c_codes to int32,
    four. Of 1x128 tiles the scales of a column come one after another, of square ones those of a
    row. A side whose ``scales`` are None is folded, by the tensor's ``amax``.
    """
    top = 1.0
    if amax is not None:
        _, _, top, _ = fp8_tile_scales(tl.load(amax) + tl.zeros((1,), tl.float32), 0.0, E, OPTIONS)
        top = tl.sum(top, 0)
    if tl.program_id(0) == 0:
        if ROW > 0:
            tl.store(r_tensor_scale, top if r_scales is None else 1.0)
        if COL > 0:
            tl.store(c_tensor_scale, top if c_scales is None else 1.0)
    tiles = tl.cdiv(C, TILE)
    row0 = (tl.program_id(0) // tiles) * TILE
    col0 = (tl.program_id(0) % tiles) * TILE
    G: tl.constexpr = TILE // 4
    r, c = row0 + tl.arange(0, G) * 4, col0 + tl.arange(0, TILE // 2) * 2
    evens, odds = _halves(x, stride_r, stride_c, row0, col0, R, C, EVEN)
    by_row = ()
    even_most, odd_most = tl.abs(evens[0].to(tl.float32)), tl.abs(odds[0].to(tl.float32))
    for i in tl.static_range(4):
        even, odd = tl.abs(evens[i].to(tl.float32)), tl.abs(odds[i].to(tl.float32))
        by_row = by_row + (tl.reduce(larger(even, odd), 1, larger),)
        even_most, odd_most = larger(even_most, even), larger(odd_most, odd)
    even_most, odd_most = tl.reduce(even_most, 0, larger), tl.reduce(odd_most, 0, larger)
    even_factor, odd_factor, even_ratio, odd_ratio = 1.0, 1.0, 1.0, 1.0
    if COL == 1:
        even_stored, even_factor, _, _ = fp8_tile_scales(even_most, 0.0, E, OPTIONS)
        odd_stored, odd_factor, _, _ = fp8_tile_scales(odd_most, 0.0, E, OPTIONS)
        if c_scales is not None:
            at = c_scales + (row0 // TILE).to(tl.int64) * C + c
            tl.store(at, even_stored, mask=c < C)
            tl.store(at + 1, odd_stored, mask=c + 1 < C)
        else:
            even_ratio = fold_ratio(even_stored, top)[None, :]
            odd_ratio = fold_ratio(odd_stored, top)[None, :]
        even_factor, odd_factor = even_factor[None, :], odd_factor[None, :]
    factor, ratio = 1.0, 1.0
    if ROW == 128 or COL == 128:
        most = tl.reduce(larger(even_most, odd_most), 0, larger) + tl.zeros((1,), tl.float32)
        stored, square, _, _ = fp8_tile_scales(most, 0.0, E, OPTIONS)
        square_ratio = fold_ratio(stored, top)[:, None]
        at = tl.arange(0, 1)
        if ROW == 128:
            if r_scales is not None:
                tl.store(r_scales + row0 // TILE * (r_columns // TILE) + col0 // TILE + at, stored)
            factor, ratio = square[:, None], square_ratio
        if COL == 128:
            if c_scales is not None:
                tl.store(c_scales + col0 // TILE * (c_columns // TILE) + row0 // TILE + at, stored)
            even_factor, odd_factor = square[:, None], square[:, None]
            even_ratio, odd_ratio = square_ratio, square_ratio
    for i in tl.static_range(4):
        if ROW == 1:
            stored, factor, _, _ = fp8_tile_scales(by_row[i], 0.0, E, OPTIONS)
            if r_scales is not None:
                at = r_scales + (col0 // TILE).to(tl.int64) * R + r + i
                tl.store(at, stored, mask=r + i < R)
            else:
                ratio = fold_ratio(stored, top)[:, None]
            factor = factor[:, None]
        if ROW > 0:
            even, odd = evens[i].to(tl.float32) * factor, odds[i].to(tl.float32) * factor
            at = (r + i).to(tl.int64)[:, None] * (r_columns // 2)
            at += (col0 // 2 + tl.arange(0, TILE // 2))[None, :]
            pair = code_pair(even, odd, ratio, E, r_scales is None)
            if EVEN:
                tl.store(r_codes + at, pair)
            else:
                tl.store(r_codes + at, pair, mask=(r + i < R)[:, None])
    if COL > 0:
        FOLD: tl.constexpr = c_scales is None
        words = tl.join(_four_rows(evens, even_factor, even_ratio, E, FOLD),
                        _four_rows(odds, odd_factor, odd_ratio, E, FOLD))  # fmt: skip
        words = tl.reshape(tl.permute(words, (1, 2, 0)), (TILE, G))
        c = col0 + tl.arange(0, TILE)
        at = c.to(tl.int64)[:, None] * (c_columns // 4) + (row0 // 4 + tl.arange(0, G))[None, :]
        if EVEN:
            tl.store(c_codes + at, words)
        else:
            tl.store(c_codes + at, words, mask=(c < C)[:, None])


@triton.jit
def _halves(x, stride_r, stride_c, row0, col0, R, C, EVEN: tl.constexpr):
    """Load even and odd columns of rows i, i + 4, ..., for i from 0 to 3, in x's dtype."""
    G: tl.constexpr = TILE // 4
    evens, odds = (), ()
    for i in tl.static_range(4):
        rows = load_raw(x + i * stride_r, stride_r * 4, stride_c, row0 // 4, col0,
                        tl.cdiv(R - i, 4), C, G, TILE, EVEN)  # fmt: skip
        even, odd = tl.split(tl.reshape(rows, (G, TILE // 2, 2)))
        evens, odds = evens + (even,), odds + (odd,)
    return evens, odds


@triton.jit
def _four_rows(rows, factor, ratio, E: tl.constexpr, FOLD: tl.constexpr):
    """Encode four neighbours along a column as words (int32)."""
    low = _two_rows(rows[0], rows[1], factor, ratio, E, FOLD)
    high = _two_rows(rows[2], rows[3], factor, ratio, E, FOLD)
    return join_pairs(low, high)


@triton.jit
def _two_rows(a, b, factor, ratio, E: tl.constexpr, FOLD: tl.constexpr):
    a, b = a.to(tl.float32) * factor, b.to(tl.float32) * factor
    return code_pair(a, b, ratio, E, FOLD)
