"""The amax of a matrix and of its transpose in one pass, each after its transform.

A transform's last steps, scaling and rounding to BF16, keep the order of magnitudes: they are left
to the largest one.
"""

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import abs_bits
from megatron_lowbit.kernels.hadamard import MAX_LANES, butterfly_lanes, finish, transform_tile
from megatron_lowbit.kernels.sections import (
    COL_SIGNS,
    FIRST_TILE,
    QUANTIZE_FIELDS,
    ROW_SIGNS,
    ROWS,
    X,
    entry,
    pointer,
    section_of,
)
from megatron_lowbit.kernels.tiles import load_column_lanes, load_row_lanes, load_tile


@triton.jit(do_not_specialize=["row_signs", "col_signs"])
def amax_kernel(
    x, stride_r, stride_c, R, C, table, row_amax, row_signs, col_amax, col_signs,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Compute the amaxes of x (R, C) and its transpose, after ROW and COL, as FP32 bits.

    They are maxed into zeroed int32 scalars. ROW and COL are Transforms or None, where x as it is
    counts; ``row_amax`` or ``col_amax`` may be None. With a ``table`` of matrices in
    COUNT columns (see ``sections.py``) they are arrays.
    """
    tiles = tl.cdiv(C, TN)
    # From the end, which was written last, to the beginning, where quantization begins: what the
    # cache still has of one pass serves the next.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program // tiles
    col0 = (program % tiles) * TN
    if table is not None:
        section = section_of(table, tile, QUANTIZE_FIELDS, COUNT)
        tile -= entry(table, section, FIRST_TILE, COUNT).to(tl.int32)
        x = pointer(table, section, X, COUNT, x)
        R = entry(table, section, ROWS, COUNT).to(tl.int32)
        row_signs = entry(table, section, ROW_SIGNS, COUNT)
        col_signs = entry(table, section, COL_SIGNS, COUNT)
        if row_amax is not None:
            row_amax += section
        if col_amax is not None:
            col_amax += section
    row0 = tile * TM
    PLAIN: tl.constexpr = (row_amax is not None and ROW is None) or (
        col_amax is not None and COL is None
    )
    COLUMNS: tl.constexpr = COL is not None and COL.size <= MAX_LANES
    if PLAIN and not COLUMNS:
        values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
        amax = tl.max(tl.max(abs_bits(values), 1), 0)
        if row_amax is not None and ROW is None:
            tl.atomic_max(row_amax, amax)
        if col_amax is not None and COL is None:
            tl.atomic_max(col_amax, amax)
    if row_amax is not None and ROW is not None:
        if ROW.size <= MAX_LANES and ROW.size >= 8:
            P: tl.constexpr = ROW.size
            lanes = load_row_lanes(x, stride_r, stride_c, row0, col0, R, C, TM, TN, P, EVEN)
            tl.atomic_max(row_amax, _transformed_amax(lanes, row_signs, ROW))
        else:
            values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
            values = transform_tile(values, row_signs, TM, TN, ROW)
            tl.atomic_max(row_amax, tl.max(tl.max(abs_bits(values), 1), 0))
    if COLUMNS:
        Q: tl.constexpr = COL.size
        lanes = load_column_lanes(x, stride_r, stride_c, row0, col0, R, C, TM, TN, Q, EVEN)
        if PLAIN:
            tl.atomic_max(row_amax, tl.max(_lane_amax(lanes, Q), 0))
        tl.atomic_max(col_amax, _transformed_amax(lanes, col_signs, COL))
    elif col_amax is not None and COL is not None:
        values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
        values = transform_tile(tl.trans(values), col_signs, TN, TM, COL)
        tl.atomic_max(col_amax, tl.max(tl.max(abs_bits(values), 1), 0))


@triton.jit
def _lane_amax(lanes, N: tl.constexpr):
    amax = abs_bits(lanes[0])
    for i in tl.static_range(1, N):
        amax = tl.maximum(amax, abs_bits(lanes[i]))
    return amax


@triton.jit
def _transformed_amax(lanes, signs, H: tl.constexpr):
    N: tl.constexpr = H.size
    sums = butterfly_lanes(lanes, signs, N, H)
    amax = tl.max(_lane_amax(sums, N), 0).to(tl.float32, bitcast=True)
    return abs_bits(finish(amax, H))


@triton.jit(do_not_specialize=["row_signs", "col_signs"])
def row_amax_kernel(
    x, stride_r, stride_c, R, C, row_amax, row_signs, col_amax, col_signs,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute amaxes of rows of x (R, C) after ROW and of its transpose after COL, as FP32 bits.

    They are maxed into zeroed int32 (R,) and (C,), either of which may be None. ROW and COL are
    Transforms, or None where x as it is counts.
    """
    tiles = tl.cdiv(C, TN)
    row0 = (tl.program_id(0) // tiles) * TM
    col0 = (tl.program_id(0) % tiles) * TN
    tile = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
    if row_amax is not None:
        _max_rows(tile, row_amax, row_signs, row0, R, TM, TN, ROW)
    if col_amax is not None:
        _max_rows(tl.trans(tile), col_amax, col_signs, col0, C, TN, TM, COL)


@triton.jit
def _max_rows(x, amax, signs, row0, R, A: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """Reduce the rows of a tile [A, B] into ``amax`` from ``row0`` on, by maximum."""
    if H is not None:
        x = transform_tile(x, signs, A, B, H)
    r = row0 + tl.arange(0, A)
    tl.atomic_max(amax + r, tl.max(abs_bits(x), 1), mask=r < R, sem="relaxed")
