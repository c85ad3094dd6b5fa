"""FP8 tiles of 128 on a GPU: a matrix and its transpose from one read, rounded to nearest.

A program takes 128 x 128 elements, as four tensors of every fourth row: four codes of a column then
make one word of the transpose, which is four times less to move between threads.
"""

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import abs_bits, encode
from megatron_lowbit.kernels.scales import fp8_tile_scales
from megatron_lowbit.kernels.tiles import load_tile

TILE = tl.constexpr(128)


@triton.jit
def fp8_tiles_kernel(
    x, stride_r, stride_c, R, C, r_codes, r_scales, c_codes, c_scales, r_one, c_one,
    r_columns, c_columns,
    ROW: tl.constexpr, COL: tl.constexpr, E: tl.constexpr, OPTIONS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Codes and scales of x (R, C) and of its transpose.

    ROW and COL are rows of a tile, 1 or 128, or 0 for a side that is not wanted. ``one`` are their
    tensor scales, ``columns`` the lengths of their rows of codes; c_codes points to int32, four
    codes each.
    """
    if tl.program_id(0) == 0:
        if ROW > 0:
            tl.store(r_one, 1.0)
        if COL > 0:
            tl.store(c_one, 1.0)
    tiles = tl.cdiv(C, TILE)
    row0 = (tl.program_id(0) // tiles) * TILE
    col0 = (tl.program_id(0) % tiles) * TILE
    G: tl.constexpr = TILE // 4
    r, c = row0 + tl.arange(0, G) * 4, col0 + tl.arange(0, TILE)
    largest = tl.zeros((G, TILE), tl.int32)
    for i in tl.static_range(4):
        quarter = load_tile(x + i * stride_r, stride_r * 4, stride_c, row0 // 4, col0,
                            tl.cdiv(R - i, 4), C, G, TILE, EVEN)  # fmt: skip
        largest = tl.maximum(largest, abs_bits(quarter))
        if ROW == 1:
            most = tl.max(abs_bits(quarter), 1).to(tl.float32, bitcast=True)
            stored, factor, _, _ = fp8_tile_scales(most, 0.0, E, OPTIONS)
            at = r_scales + (r + i).to(tl.int64) * (r_columns // TILE) + col0 // TILE
            tl.store(at, stored, mask=r + i < R)
            code = encode(quarter * factor[:, None], largest, E, False)
            _store_row(r_codes, code, r + i, c, R, r_columns, EVEN)
    by_column = tl.max(largest, 0)
    if COL == 1:
        most = by_column.to(tl.float32, bitcast=True)
        stored, along, _, _ = fp8_tile_scales(most, 0.0, E, OPTIONS)
        at = c_scales + c.to(tl.int64) * (c_columns // TILE) + row0 // TILE
        tl.store(at, stored, mask=c < C)
        along = along[None, :]
    if ROW == 128 or COL == 128:
        most = (tl.zeros((1,), tl.int32) + tl.max(by_column, 0)).to(tl.float32, bitcast=True)
        stored, square, _, _ = fp8_tile_scales(most, 0.0, E, OPTIONS)
        at = tl.arange(0, 1)
        if ROW == 128:
            tl.store(r_scales + row0 // TILE * (r_columns // TILE) + col0 // TILE + at, stored)
        if COL == 128:
            tl.store(c_scales + col0 // TILE * (c_columns // TILE) + row0 // TILE + at, stored)
        square = square[:, None]
    if COL > 0 or ROW == 128:
        word = tl.zeros((G, TILE), tl.int32)
        for i in tl.static_range(4):
            # Once more, from the cache: held in registers they would leave room for one program.
            quarter = load_tile(x + i * stride_r, stride_r * 4, stride_c, row0 // 4, col0,
                                tl.cdiv(R - i, 4), C, G, TILE, EVEN)  # fmt: skip
            if ROW == 128:
                code = encode(quarter * square, word, E, False)
                _store_row(r_codes, code, r + i, c, R, r_columns, EVEN)
            if COL > 0:
                if COL == 1:
                    code = encode(quarter * along, word, E, False)
                else:
                    code = encode(quarter * square, word, E, False)
                word = word | (code << (8 * i))
    if COL > 0:
        g = row0 // 4 + tl.arange(0, G)
        at = c_codes + c.to(tl.int64)[:, None] * (c_columns // 4) + g[None, :]
        if EVEN:
            tl.store(at, tl.trans(word))
        else:
            tl.store(at, tl.trans(word), mask=(c < C)[:, None] & (g < c_columns // 4)[None, :])


@triton.jit
def _store_row(base, code, r, c, rows, columns, EVEN: tl.constexpr):
    at = base + r.to(tl.int64)[:, None] * columns + c[None, :]
    if EVEN:
        tl.store(at, code.to(tl.uint8))
    else:
        tl.store(at, code.to(tl.uint8), mask=(r < rows)[:, None] & (c < columns)[None, :])
