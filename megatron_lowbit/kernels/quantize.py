"""Quantization on a GPU: a matrix and its transpose in one pass, bit for bit as ``numerics/`` says.

A program takes a tile of the matrix. For the matrix itself (blocks along its rows' elements) the
tile is one tensor; for the transpose (blocks along its columns) every row of a block, or of a
transform, is a tensor of its own, so that amaxes and butterflies stay within a thread.
"""

from collections.abc import Callable
from typing import NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import (
    Element,
    abs_bits,
    block_amax,
    encode,
    over_block,
    over_rows,
)
from megatron_lowbit.kernels.hadamard import Transform, transform_points, transform_tile
from megatron_lowbit.kernels.random_words import numbers, philox, word_tile

MAX_POINTS = tl.constexpr(64)
"""Of more rows than this a block of the transpose is not taken apart: too much code."""


class Side(NamedTuple):
    """How one side is quantized, as a constexpr.

    ``block`` is 1 for a format without block scales. ``points``: how many rows of the matrix go
    together as tensors of their own; 0 for a tile as one tensor.
    """

    scales: Callable
    block_rows: int
    block: int
    element: Element
    options: tuple
    stochastic: bool
    transform: Transform | None
    points: int


@triton.jit(do_not_specialize=["r_key", "r_signs", "c_key", "c_signs"])
def quantize_kernel(
    x, stride_r, stride_c, R, C,
    r_columns, r_amax, r_codes, r_scales, r_tensor_scale, r_key, r_rows, r_quads, r_signs,
    c_columns, c_amax, c_codes, c_scales, c_tensor_scale, c_key, c_rows, c_quads, c_signs,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize x (R, C) by ROW (arguments r_) and its transpose by COL (c_); either may be None.

    ``columns`` is the length of a row of codes in elements: whole blocks and transforms. ``rows``
    and ``quads`` are global numbers for the random words, or None as ``amax`` is where unused.
    Tiles are TM x TN; with EVEN they cover x exactly.
    """
    tiles = tl.cdiv(C, TN)
    row0 = (tl.program_id(0) // tiles) * TM
    col0 = (tl.program_id(0) % tiles) * TN
    if ROW is not None:
        tile = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
        _tile_side(
            tile, row0, col0, R, C,
            r_columns, r_amax, r_codes, r_scales, r_tensor_scale, r_key, r_rows, r_quads, r_signs,
            TM, TN, ROW, EVEN,
        )  # fmt: skip
    if COL is not None:
        if COL.points > 0:
            POINTS: tl.constexpr = COL.points
            points = load_points(x, stride_r, stride_c, row0, col0, R, C, TM, TN, POINTS, EVEN)
            _points_side(
                points, row0, col0, R, C,
                c_columns, c_amax, c_codes, c_scales, c_tensor_scale, c_key, c_rows, c_quads,
                c_signs, TM, TN, COL, EVEN,
            )  # fmt: skip
        else:
            tile = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
            _tile_side(
                tl.trans(tile), col0, row0, C, R,
                c_columns, c_amax, c_codes, c_scales, c_tensor_scale, c_key, c_rows, c_quads,
                c_signs, TN, TM, COL, EVEN,
            )  # fmt: skip


@triton.jit
def amax_kernel(
    x, stride_r, stride_c, R, C, row_amax, row_signs, col_amax, col_signs,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Largest magnitudes, as FP32 bits, of x (R, C) and its transpose, each after its transform.

    They are maxed into zeroed int32 scalars. ROW and COL are Transforms or None, where x as it is
    counts; ``row_amax`` or ``col_amax`` may be None.
    """
    tiles = tl.cdiv(C, TN)
    row0 = (tl.program_id(0) // tiles) * TM
    col0 = (tl.program_id(0) % tiles) * TN
    if row_amax is not None:
        tile = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
        if ROW is not None:
            tile = transform_tile(tile, row_signs, TM, TN, ROW)
        tl.atomic_max(row_amax, tl.max(tl.max(abs_bits(tile), 1), 0))
    if col_amax is not None:
        if COL is None or COL.points > MAX_POINTS:
            tile = tl.trans(load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN))
            if COL is not None:
                tile = transform_tile(tile, col_signs, TN, TM, COL)
            most = abs_bits(tile)
        else:
            POINTS: tl.constexpr = COL.points
            points = load_points(x, stride_r, stride_c, row0, col0, R, C, TM, TN, POINTS, EVEN)
            points = transform_points(points, col_signs, POINTS, COL)
            most = abs_bits(points[0])
            for i in tl.static_range(1, POINTS):
                most = tl.maximum(most, abs_bits(points[i]))
        tl.atomic_max(col_amax, tl.max(tl.max(most, 1), 0))


@triton.jit
def load_tile(
    x, stride_r, stride_c, row0, col0, R, C, TM: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr
):
    """x's tile at (row0, col0) in FP32, [TM, TN]; zeros outside of x."""
    r, c = tl.arange(0, TM)[:, None], tl.arange(0, TN)[None, :]
    at = (
        x
        + row0.to(tl.int64) * stride_r
        + col0.to(tl.int64) * stride_c
        + r * stride_r
        + c * stride_c
    )
    if EVEN:
        return tl.load(at).to(tl.float32)
    else:
        inside = (row0 + r < R) & (col0 + c < C)
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_points(
    x, stride_r, stride_c, row0, col0, R, C,
    TM: tl.constexpr, TN: tl.constexpr, POINTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same tile as a tuple of [TM // POINTS, TN]: i of it holds rows i, i + POINTS, ..."""
    r, c = tl.arange(0, TM // POINTS)[:, None] * POINTS, tl.arange(0, TN)[None, :]
    at = (
        x
        + row0.to(tl.int64) * stride_r
        + col0.to(tl.int64) * stride_c
        + r * stride_r
        + c * stride_c
    )
    points = ()
    for i in tl.static_range(POINTS):
        if EVEN:
            point = tl.load(at + i * stride_r)
        else:
            inside = (row0 + r + i < R) & (col0 + c < C)
            point = tl.load(at + i * stride_r, mask=inside, other=0.0)
        points = points + (point.to(tl.float32),)
    return points


@triton.jit
def _tile_side(
    x, row0, col0, R, C, columns, amax, codes, scales, tensor_scale, key, rows, quads, signs,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize a tile [A, B] whose blocks run along its rows' elements."""
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    H: tl.constexpr = S.transform
    if S.transform is not None:
        x = transform_tile(x, signs, A, B, H)
    words = x
    if S.stochastic:
        words = word_tile(
            key, numbers(rows, row0, R, A), numbers(quads, col0 // 4, columns // 4, B // 4), A, B
        )
    amax = tl.load(amax) if amax is not None else 0.0
    if S.block > 1:
        most = block_amax(x, A, B, S.block_rows, S.block)
        stored, factor, decode = SCALES(most, amax, E, OPTIONS)
        x = x * over_block(factor, A, B, S.block_rows, S.block)
        if stored.dtype == tl.int32:
            stored = over_rows(stored, A, B // S.block, S.block_rows)
        step: tl.constexpr = A // stored.shape[0]
        _store(scales, stored, row0 // step, col0 // S.block, tl.cdiv(R, step),
               columns // S.block, EVEN)  # fmt: skip
    else:
        _, factor, decode = SCALES(amax, amax, E, OPTIONS)
        x = x * factor
    values = encode(x, words, E, S.stochastic)
    if E.bits == 4:
        low, high = tl.split(tl.reshape(values, (A, B // 2, 2)))
        _store(codes, low | (high << 4), row0, col0 // 2, R, columns // 2, EVEN)
    else:
        _store(codes, values, row0, col0, R, columns, EVEN)
    if (row0 == 0) & (col0 == 0):
        tl.store(tensor_scale, decode)


@triton.jit
def _store(base, tile, row0, col0, rows, columns, EVEN: tl.constexpr):
    """Write a tile of a contiguous matrix (rows, columns)."""
    r, c = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
    at = base + (row0.to(tl.int64) * columns + col0) + (r * columns + c)
    tile = tile.to(base.dtype.element_ty)
    if EVEN:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(row0 + r < rows) & (col0 + c < columns))


@triton.jit
def _store_transposed(base, tile, at, col0, rows, columns, EVEN: tl.constexpr):
    """Write a tile [G, N] to rows col0 to col0 + N, elements ``at`` [G, 1], of (rows, columns)."""
    r = col0 + tl.arange(0, tile.shape[1])[None, :]
    where = base + r.to(tl.int64) * columns + at
    tile = tile.to(base.dtype.element_ty)
    if EVEN:
        tl.store(where, tile)
    else:
        tl.store(where, tile, mask=(r < rows) & (at < columns))


@triton.jit
def _points_side(
    points, row0, col0, R, C, columns, amax, codes, scales, tensor_scale, key, rows, quads, signs,
    TM: tl.constexpr, TN: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize the transpose of a tile given as tensors of rows, [G, TN] each.

    ``codes`` is a pointer to int32: several codes of a row are written at once.
    """
    SCALES: tl.constexpr = S.scales
    E: tl.constexpr = S.element
    OPTIONS: tl.constexpr = S.options
    H: tl.constexpr = S.transform
    BLOCK: tl.constexpr = S.block
    POINTS: tl.constexpr = S.points
    G: tl.constexpr = TM // POINTS
    PER: tl.constexpr = 8 if E.bits == 4 else 4  # codes an int32 word of the output
    if S.transform is not None:
        points = transform_points(points, signs, POINTS, H)
    amax = tl.load(amax) if amax is not None else 0.0
    row_numbers = numbers(rows, col0, C, TN)[None, :]
    for first in tl.static_range(0, POINTS, BLOCK):
        most = abs_bits(points[first])
        for i in tl.static_range(1, BLOCK):
            most = tl.maximum(most, abs_bits(points[first + i]))
        stored, factor, decode = SCALES(most.to(tl.float32, bitcast=True), amax, E, OPTIONS)
        at = row0 + tl.arange(0, G)[:, None] * POINTS + first
        block = ()
        words = (stored, stored, stored, stored)
        for i in tl.static_range(BLOCK):
            if S.stochastic and i % 4 == 0:
                quad = (at + i) // 4
                if quads is not None:
                    quad = tl.load(quads + quad, mask=quad * 4 < columns, other=0).to(tl.int32)
                words = philox(
                    key, tl.broadcast_to(quad, (G, TN)), tl.broadcast_to(row_numbers, (G, TN))
                )
            block = block + (encode(points[first + i] * factor, words[i % 4], E, S.stochastic),)
        for word in tl.static_range(BLOCK // PER):
            packed = block[word * PER]
            for j in tl.static_range(1, PER):
                packed = packed | (block[word * PER + j] << (j * (32 // PER)))
            _store_transposed(codes, packed, at // PER + word, col0, C, columns // PER, EVEN)
        _store_transposed(scales, stored, at // BLOCK, col0, C, columns // BLOCK, EVEN)
    if (row0 == 0) & (col0 == 0):
        tl.store(tensor_scale, decode)
