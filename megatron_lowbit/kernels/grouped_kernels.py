"""Kernels that multiply many pairs of matrices: programs find tiles of products in a table.

``grouped_kernel`` has a program per tile. ``stacked_kernel`` multiplies parts of one FP8 matrix
with parts of another. Of n programs, one or two per multiprocessor, program p takes the tiles p,
p + n, p + 2n and so on. It takes the steps of all its tiles in one loop and loads operands of the
next tile, whose descriptors never change, while it finishes the current one. Of two programs on a
multiprocessor, one multiplies while the other adds up. Each then has half of the registers and of
the shared memory: enough for the sums and the operands of a tile, but for the products and results
of only half of it, so that the tile is computed in two parts.
"""

import triton
import triton.language as tl

from megatron_lowbit.kernels.sections import FIRST_TILE, entry, pointer, section_of

OUT, ROWS, COLUMNS, A_FACTOR, B_FACTOR = (tl.constexpr(i) for i in range(1, 6))
"""Rows of a table of products, after the first tiles."""
TERMS, A, A_STEP, A_SCALES, B, B_STEP, B_SCALES = (tl.constexpr(i) for i in range(6, 13))
_FIELDS = tl.constexpr(13)
"""Further rows for the products of ``grouped_kernel``; their number."""
STEPS, OUTS, OUT_ROW = (tl.constexpr(i) for i in range(6, 9))
A_STACK, A_ROWS, A_COLUMNS, A_ROW, A_COLUMN = (tl.constexpr(i) for i in range(9, 14))
B_STACK, B_ROWS, B_COLUMNS, B_ROW, B_COLUMN = (tl.constexpr(i) for i in range(14, 19))
_STACKED_FIELDS = tl.constexpr(19)
"""Further rows for the products of ``stacked_kernel``; their number."""
_SCALED = tl.constexpr(128)
"""Products to a scale of FP8 tiles."""
_NEIGHBOURS = tl.constexpr(8)
"""Row tiles computed one after another with the same columns, which stay in the cache."""
NOT_STACKED = tl.constexpr(2**31 - 1)
"""First row of a result that is no part of one matrix with the others."""


@triton.jit
def grouped_kernel(
    table, a_like, b_like, out_like,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr, SCALED: tl.constexpr, ADDS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one of the products of a table in COUNT columns.

    ``a_like``, ``b_like`` and ``out_like`` tell dtypes.
    """
    tile = tl.program_id(0)
    i = section_of(table, tile, _FIELDS, COUNT)
    if i < 0:
        return
    tile -= _number(table, i, FIRST_TILE, COUNT)
    rows, columns = _number(table, i, ROWS, COUNT), _number(table, i, COLUMNS, COUNT)
    terms = _number(table, i, TERMS, COUNT)
    row0, col0 = tile_origin(tile, rows, columns, TM, TN)
    if SCALED:
        a = _addresses(table, i, A, A_STEP, a_like, row0, TM, TK, COUNT)
        b = _addresses(table, i, B, B_STEP, b_like, col0, TN, TK, COUNT)
    else:
        a = _descriptor(table, i, A, A_STEP, a_like, rows, terms, TM, TK, A_BY_ROWS, COUNT)
        b = _descriptor(table, i, B, B_STEP, b_like, columns, terms, TN, TK, B_BY_ROWS, COUNT)
    sums = tl.zeros((TM, TN), dtype=tl.float32)
    if SCALED:
        row = row0 + tl.arange(0, TM)
        left_scales = entry(table, i, A_SCALES, COUNT).to(tl.pointer_type(tl.float32)) + row
        right_scales = entry(table, i, B_SCALES, COUNT).to(tl.pointer_type(tl.float32))
        right_scales += col0 // _SCALED * tl.cdiv(terms, _SCALED)
        # Scales are asked for a step ahead: only loads of the operands are pipelined.
        scale = _scale(left_scales, right_scales, row < rows, terms > 0)
        for k0 in tl.range(0, terms, TK):
            left_scales += rows
            right_scales += 1
            following = _scale(left_scales, right_scales, row < rows, k0 + TK < terms)
            left = _load(a, row0, k0, rows, terms, TM, TK, A_BY_ROWS)
            right = _load(b, col0, k0, columns, terms, TN, TK, B_BY_ROWS)
            sums += tl.dot(left, right.T) * scale[:, None]
            scale = following
    else:
        for k0 in tl.range(0, terms, TK):
            left = _load(a, row0, k0, rows, terms, TM, TK, A_BY_ROWS)
            right = _load(b, col0, k0, columns, terms, TN, TK, B_BY_ROWS)
            sums = tl.dot(left, right.T, sums)
        sums *= _factor(table, i, COUNT)
    start = pointer(table, i, OUT, COUNT, out_like)
    if ADDS or not SCALED:
        out = tl.make_tensor_descriptor(start, [rows, columns], [columns.to(tl.int64), 1], [TM, TN])
        if ADDS:
            sums += out.load([row0, col0]).to(tl.float32)
        out.store([row0, col0], sums.to(out_like.dtype.element_ty))
    else:
        row, column = row0 + tl.arange(0, TM), col0 + tl.arange(0, TN)
        step = _in_16_bytes(columns, out_like)
        addresses = start + row.to(tl.int64)[:, None] * step + column[None, :]
        inside = (row < rows)[:, None] & (column < step)[None, :]
        tl.store(addresses, sums.to(out_like.dtype.element_ty), mask=inside)


@triton.jit
def _descriptor(
    table, i, FIELD: tl.constexpr, STEP: tl.constexpr, template, rows, terms, TR: tl.constexpr,
    TK: tl.constexpr, BY_ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Describe a matrix (rows, terms), which is read in tiles (TR, TK)."""
    start, step = pointer(table, i, FIELD, COUNT, template), entry(table, i, STEP, COUNT)
    if BY_ROWS:
        return tl.make_tensor_descriptor(start, [rows, terms], [step, 1], [TR, TK])
    else:
        return tl.make_tensor_descriptor(start, [terms, rows], [step, 1], [TK, TR])


@triton.jit
def _addresses(
    table, i, FIELD: tl.constexpr, STEP: tl.constexpr, template, row0, TR: tl.constexpr,
    TK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Return the addresses of the first tile (TR, TK) of some rows."""
    start, step = pointer(table, i, FIELD, COUNT, template), entry(table, i, STEP, COUNT)
    row = (row0 + tl.arange(0, TR)).to(tl.int64)
    return start + row[:, None] * _in_16_bytes(step, template) + tl.arange(0, TK)[None, :]


@triton.jit
def _load(matrix, row0, k0, rows, terms, TR: tl.constexpr, TK: tl.constexpr, BY_ROWS: tl.constexpr):
    """Load a tile (TR, TK) by its descriptor or its addresses.

    By addresses 16 bytes are read at once: codes behind the last term are zero up to there.
    """
    if matrix.dtype.is_ptr():
        row, term = row0 + tl.arange(0, TR), k0 + tl.arange(0, TK)
        inside = (row < rows)[:, None] & (term < tl.cdiv(terms, 16) * 16)[None, :]
        return tl.load(matrix + k0, mask=inside, other=0.0)
    elif BY_ROWS:
        return matrix.load([row0, k0])
    else:
        return matrix.load([k0, row0]).T


@triton.jit
def _in_16_bytes(step, template):
    """Return a number of elements, which fill whole 16 bytes, in a form that tells Triton so."""
    elements: tl.constexpr = 128 // template.dtype.element_ty.primitive_bitwidth
    return step // elements * elements


@triton.jit
def _scale(left, right, row_inside, inside):
    """Return the scales (TM) of products of 1x128 and 128x128 tiles."""
    left_scale = tl.load(left, mask=row_inside & inside, other=0.0)
    return left_scale * tl.load(right, mask=inside, other=0.0)


@triton.jit
def stacked_kernel(
    table, a_like, b_like, out_like,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, PARTS: tl.constexpr,
    ADDS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Compute a program's tiles of the products of a table in COUNT columns.

    A tile has one or two PARTS of (TM, TN). The table begins its list of tiles with what
    ``sections.steps_per_program`` returns. ``a_like``, ``b_like`` and ``out_like`` tell dtypes.
    """
    tile, behind = tl.program_id(0), tl.num_programs(0) + 1
    apart = tl.load(table + _STACKED_FIELDS * COUNT).to(tl.int32)
    steps = tl.load(table + _STACKED_FIELDS * COUNT + 1 + tile).to(tl.int32)
    a = _stacked(table, A_STACK, A_ROWS, A_COLUMNS, a_like, TM, TK, COUNT)
    b = _stacked(table, B_STACK, B_ROWS, B_COLUMNS, b_like, TN, TK, COUNT)
    all_columns = entry(table, 0, COLUMNS, COUNT)
    # Only whole tiles are stored through it: its number of rows does not matter.
    outs = tl.make_tensor_descriptor(
        pointer(table, 0, OUTS, COUNT, out_like),
        [NOT_STACKED, all_columns.to(tl.int32)], [all_columns, 1], [TM, TN],
    )  # fmt: skip
    upper, lower = tl.zeros((TM, TN), tl.float32), tl.zeros((TM, TN), tl.float32)
    i, row0, col0, rows, k0, left = tile, tile, tile, tile, 0, 0
    a_row, a_column, b_row, b_column = tile, tile, tile, tile
    for _ in tl.range(0, steps):
        # Triton loads in advance only where all of this comes before the loads.
        k0, left = k0 + TK, left - 1
        if left < 0:
            i = section_of(table, tile, _STACKED_FIELDS, COUNT, behind)
            within = tile - _number(table, i, FIRST_TILE, COUNT)
            tile += apart
            rows, columns = _number(table, i, ROWS, COUNT), _number(table, i, COLUMNS, COUNT)
            row0, col0 = tile_origin(within, rows, columns, PARTS * TM, TN)
            a_row, a_column = _number(table, i, A_ROW, COUNT), _number(table, i, A_COLUMN, COUNT)
            b_row, b_column = _number(table, i, B_ROW, COUNT), _number(table, i, B_COLUMN, COUNT)
            k0, left = 0, _number(table, i, STEPS, COUNT) - 1
        rhs = b.load([b_row + col0, b_column + k0])
        lhs = a.load([a_row + row0, a_column + k0])
        upper = tl.dot(lhs, rhs.T, upper, max_num_imprecise_acc=TK)
        if PARTS == 2:
            lhs = a.load([a_row + row0 + TM, a_column + k0])
            lower = tl.dot(lhs, rhs.T, lower, max_num_imprecise_acc=TK)
        if left == 0:
            factor = _factor(table, i, COUNT)
            upper, lower = upper * factor, lower * factor
            first = _number(table, i, OUT_ROW, COUNT)
            if (first != NOT_STACKED) & (row0 + PARTS * TM <= rows):
                _store(outs, first + row0, col0, upper, lower, out_like, PARTS, ADDS)
            else:
                columns = _number(table, i, COLUMNS, COUNT)
                start, step = pointer(table, i, OUT, COUNT, out_like), columns.to(tl.int64)
                out = tl.make_tensor_descriptor(start, [rows, columns], [step, 1], [TM, TN])
                _store(out, row0, col0, upper, lower, out_like, PARTS, ADDS)
            upper, lower = tl.zeros((TM, TN), tl.float32), tl.zeros((TM, TN), tl.float32)


@triton.jit
def _store(out, row, col, upper, lower, out_like, PARTS: tl.constexpr, ADDS: tl.constexpr):
    """Store the sums of a tile's PARTS, or add them to what is there."""
    if ADDS:
        upper += out.load([row, col]).to(tl.float32)
    out.store([row, col], upper.to(out_like.dtype.element_ty))
    if PARTS == 2:
        row += upper.shape[0]
        if ADDS:
            lower += out.load([row, col]).to(tl.float32)
        out.store([row, col], lower.to(out_like.dtype.element_ty))


@triton.jit
def _stacked(
    table, FIELD: tl.constexpr, ROW_COUNT: tl.constexpr, STEP: tl.constexpr, template,
    TR: tl.constexpr, TK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Describe the matrix that all operands of a side are parts of."""
    start, step = pointer(table, 0, FIELD, COUNT, template), entry(table, 0, STEP, COUNT)
    shape = [_number(table, 0, ROW_COUNT, COUNT), step.to(tl.int32)]
    return tl.make_tensor_descriptor(start, shape, [step, 1], [TR, TK])


@triton.jit
def _number(table, section, FIELD: tl.constexpr, COUNT: tl.constexpr):
    """Return an entry as int32."""
    return entry(table, section, FIELD, COUNT).to(tl.int32)


@triton.jit
def tile_origin(tile, rows, columns, TM: tl.constexpr, TN: tl.constexpr):
    """Return the first row and column of a tile of a product (rows, columns)."""
    band = _NEIGHBOURS * tl.cdiv(columns, TN)
    first = tile // band * _NEIGHBOURS
    height = tl.minimum(tl.cdiv(rows, TM) - first, _NEIGHBOURS)
    return (first + tile % band % height) * TM, tile % band // height * TN


@triton.jit
def _factor(table, section, COUNT: tl.constexpr):
    """Return the product of both operands' factors, FP32; 1 for one without an address."""
    a, b = entry(table, section, A_FACTOR, COUNT), entry(table, section, B_FACTOR, COUNT)
    left = tl.load(a.to(tl.pointer_type(tl.float32)), mask=a != 0, other=1.0)
    return left * tl.load(b.to(tl.pointer_type(tl.float32)), mask=b != 0, other=1.0)
