"""Device functions: amaxes of tiles, and the pass over a matrix for the amaxes of both sides.

Amaxes are FP32 bits, which order magnitudes as integers do, a NaN as the largest. A transform's
last steps, scaling and rounding to BF16, keep the order: they are left to the largest magnitude.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import abs_bits
from megatron_lowbit.kernels.hadamard import (
    MAX_LANES,
    Transform,
    butterfly_lanes,
    finish,
    transform_tile,
)
from megatron_lowbit.kernels.random_words import key_of
from megatron_lowbit.kernels.sections import (
    COL_FIELDS,
    FIRST_TILE,
    QUANTIZE_FIELDS,
    ROW_FIELDS,
    ROWS,
    SIGNS,
    X,
    entry,
    pointer,
    section_of,
)
from megatron_lowbit.kernels.tiles import load_column_lanes, load_row_lanes, load_tile


class AmaxSpec(NamedTuple):
    """The amax of a side, as a constexpr: after a transform, of the tensor or of each row."""

    transform: Transform | None = None
    by_rows: bool = False


@triton.jit(do_not_specialize=["row_signs", "col_signs"])
def amax_kernel(
    x, stride_r, stride_c, R, C, table, row_amax, row_signs, col_amax, col_signs, first, second,
    tokens,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Compute the amaxes of x (R, C) by ROW and of its transpose by COL, AmaxSpec or None.

    They are maxed into zeroed int32: scalars, (R,) and (C,), or with a ``table`` of matrices in
    COUNT columns (see ``sections.py``) one for each, also by ``tokens`` as in ``quantize_kernel``.
    Nothing is done where the amaxes ``first`` and ``second`` are given and known, which are
    negative otherwise.
    """
    if first is not None and (tl.load(first) >= 0) & (tl.load(second) >= 0):
        return
    tiles = tl.cdiv(C, TN)
    # From the end, which was written last, to the beginning, where quantization begins: what the
    # cache still has of one pass serves the next.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program // tiles
    col0 = (program % tiles) * TN
    if table is not None:
        section = section_of(table, tile, QUANTIZE_FIELDS, COUNT)
        if section < 0:
            return
        tile -= entry(table, section, FIRST_TILE, COUNT).to(tl.int32)
        if tokens is None:
            x = pointer(table, section, X, COUNT, x)
        else:
            tokens += entry(table, section, X, COUNT)
        R = entry(table, section, ROWS, COUNT).to(tl.int32)
        row_signs = entry(table, section, ROW_FIELDS + SIGNS, COUNT)
        col_signs = entry(table, section, COL_FIELDS + SIGNS, COUNT)
        if ROW is not None:
            row_amax += section
        if COL is not None:
            col_amax += section
    row0 = tile * TM
    H: tl.constexpr = None if ROW is None or ROW.by_rows else ROW.transform
    G: tl.constexpr = None if COL is None or COL.by_rows else COL.transform
    ROW_LANES: tl.constexpr = H is not None and H.size >= 8 and H.size <= MAX_LANES
    COL_LANES: tl.constexpr = G is not None and G.size <= MAX_LANES
    # Lanes of columns are loaded as they lie: a row side without a transform takes them as well.
    SHARED: tl.constexpr = COL_LANES and ROW is not None and H is None and not ROW.by_rows
    if (ROW is not None and not ROW_LANES and not SHARED) or (COL is not None and not COL_LANES):
        values = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN, tokens)
    if ROW_LANES:
        P: tl.constexpr = H.size
        lanes = load_row_lanes(x, stride_r, stride_c, row0, col0, R, C, TM, TN, P, EVEN, tokens)
        tl.atomic_max(row_amax, _transformed_amax(lanes, key_of(row_signs), H))
    elif ROW is not None and not SHARED:
        _max_tile(values, row_amax, row_signs, row0, R, TM, TN, ROW)
    if COL_LANES:
        Q: tl.constexpr = G.size
        lanes = load_column_lanes(x, stride_r, stride_c, row0, col0, R, C, TM, TN, Q, EVEN, tokens)
        if SHARED:
            tl.atomic_max(row_amax, tl.max(_lane_amax(lanes, Q), 0))
        tl.atomic_max(col_amax, _transformed_amax(lanes, key_of(col_signs), G))
    elif COL is not None:
        if COL.by_rows or COL.transform is not None:
            values = tl.trans(values)
        _max_tile(values, col_amax, col_signs, col0, C, TN, TM, COL)


@triton.jit
def _max_tile(x, amax, signs, row0, R, A: tl.constexpr, B: tl.constexpr, S: tl.constexpr):
    """Raise the amax of a tile [A, B], or of each of its rows from ``row0`` on."""
    if S.transform is not None:
        H: tl.constexpr = S.transform
        x = transform_tile(x, key_of(signs), A, B, H)
    if S.by_rows:
        r = row0 + tl.arange(0, A)
        tl.atomic_max(amax + r, tl.max(abs_bits(x), 1), mask=r < R, sem="relaxed")
    else:
        atomic_amax(amax, x)


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


@triton.jit
def atomic_amax(amax, tile):
    """Raise an int32 scalar to the amax of a tile."""
    tl.atomic_max(amax, tl.max(tl.max(abs_bits(tile), 1), 0))


@triton.jit
def grid_amax(amax, values, tiles_done, counts, tiles):
    """Raise a matrix's amax by a tile that ``counts``; return when all its ``tiles`` have done so.

    ``tiles_done`` is the number of those that have.
    """
    if counts:
        atomic_amax(amax.to(tl.pointer_type(tl.int32), bitcast=True), values)
        tl.atomic_add(tiles_done, 1)
    while tl.atomic_add(tiles_done, 0, sem="acquire") < tiles:
        pass


@triton.jit
def delayed_amax(earlier, current_amax):
    """Return the amax of earlier steps where it is known, else the tensor's own, complete then."""
    amax = tl.load(earlier)
    return tl.where(amax < 0, tl.load(current_amax).to(tl.float32, bitcast=True), amax)
