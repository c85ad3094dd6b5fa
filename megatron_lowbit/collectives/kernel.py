"""All-reduce, residual, norm and quantization of rows in one kernel, over memory that ranks share.

Source: the three dispatch paths of Modular's "allreduce_residual_rmsnorm". Rows are summed up in
FP32, rank after rank, the residual last, and rounded once to x's dtype: that is the new residual,
and what is normalized.

    ONE_STAGE   each rank sums up all rows by itself
    COMPACT     each rank sums up, normalizes and quantizes its share; codes and scales are gathered
    GATHERED    each rank sums up its share; the sums are gathered, normalized on arrival

All give the same bits on all ranks: the same numbers are added in the same order everywhere. Where
the new residual is wanted, gathering only it moves less than gathering it and the codes.

What another rank needs is written into its memory, and a rank reads its own: a write across the
link is sent and forgotten, where a read would be waited for.
"""

import triton
import triton.language as tl

from megatron_lowbit.collectives.barrier import arrive, begin, count, wait
from megatron_lowbit.kernels.elements import as_dtype
from megatron_lowbit.kernels.norm import finish_rows, load_gain
from megatron_lowbit.kernels.tiles import load_raw, load_tile, store_tile

ONE_STAGE, COMPACT, GATHERED = (tl.constexpr(path) for path in range(3))


@triton.jit(do_not_specialize=["R", "rank", "tag", "shape", "limit", "constant", "eps"])
def all_reduce_norm_kernel(
    x, residual, total, R, C, gain, constant, eps, y, amax_out, amax, codes, scales, tensor_scale,
    buffers, state, fault, rank, tag, shape, limit, data, half,
    RANKS: tl.constexpr, PATH: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Process x (R, C), contiguous, in groups of tiles of TM rows: one per rank, in ONE_STAGE one.

    ``total`` is the sum with the residual, ``y`` that normalized, the rest as in ``finish_rows``;
    the gain is loaded once for all of a program's rows.
    A buffer's shared data begin after ``data`` bytes: twice, for calls in turn, ``half`` bytes for
    an inbox, RANKS - 1 tiles for each group, and behind it what is gathered.
    """
    SPAN: tl.constexpr = 1 if PATH == ONE_STAGE else RANKS
    DTYPE: tl.constexpr = x.dtype.element_ty
    groups = tl.cdiv(tl.cdiv(R, TM), SPAN)
    group, programs = tl.program_id(0), tl.num_programs(0)
    # Always 0, in a form that says that loads are aligned.
    col0 = tl.program_id(1) * TN
    gains = load_gain(gain, col0, C, TN, PARTS)
    call, ok = begin(buffers, state, rank, shape, RANKS)
    barrier = 0
    data += (call & 1) * half
    gathered = data + _aligned(groups * ((RANKS - 1) * TM), C, DTYPE)
    _send(buffers, data, x, group, groups, rank, col0, R, C, RANKS, SPAN, TM, TN, PARTS, EVEN)
    arrive(buffers, call, barrier, rank, tag, ok, RANKS)
    count(state)
    while group < groups:
        following = group + programs
        if following < groups:
            # They are on their way while this group's rows are summed up.
            _send(buffers, data, x, following, groups, rank, col0, R, C, RANKS, SPAN, TM, TN, PARTS,
                  EVEN)  # fmt: skip
        ok = wait(buffers, state, fault, call, barrier, rank, tag, shape, limit, ok, RANKS)
        row0 = (group * SPAN + (0 if PATH == ONE_STAGE else rank)) * TM
        parts = _sum(buffers, data, x, residual, total, group, groups, row0, rank, col0, R, C, ok,
                     RANKS, TM, TN, PARTS, EVEN)  # fmt: skip
        if PATH == GATHERED:
            for i in tl.static_range(PARTS):
                part, col = parts[i].to(DTYPE), col0 + i * TN
                _store_to_others(buffers, gathered, part, rank, row0, col, R, C, RANKS, EVEN)
            barrier += 1
            arrive(buffers, call, barrier, rank, tag, ok, RANKS)
        finish_rows(parts, row0, col0, R, C, gain, gains, constant, eps, y, None, amax_out, amax,
                    codes, scales, tensor_scale, DTYPE, TM, TN, PARTS, BLOCK, P, S,
                    EVEN)  # fmt: skip
        if PATH == COMPACT:
            tl.debug_barrier()  # codes are read by other threads than have made them
            _send_codes(buffers, gathered, codes, scales, rank, row0, col0, R, C, RANKS, TM, TN,
                        PARTS, BLOCK, S, EVEN)  # fmt: skip
            barrier += 1
            arrive(buffers, call, barrier, rank, tag, ok, RANKS)
        if PATH != ONE_STAGE:
            ok = wait(buffers, state, fault, call, barrier, rank, tag, shape, limit, ok, RANKS)
            for step in range(1, RANKS):
                row0 = (group * RANKS + (rank + step) % RANKS) * TM
                if PATH == COMPACT:
                    _take_codes(buffers, gathered, codes, scales, rank, row0, col0, R, C, ok, TM,
                                TN, PARTS, BLOCK, S, EVEN)  # fmt: skip
                else:
                    parts = _take_sum(buffers, gathered, total, rank, row0, col0, R, C, ok,
                                      DTYPE, TM, TN, PARTS, EVEN)  # fmt: skip
                    finish_rows(parts, row0, col0, R, C, gain, gains, constant, eps, y, None,
                                amax_out, amax, codes, scales, tensor_scale, DTYPE, TM, TN, PARTS,
                                BLOCK, P, S, EVEN)  # fmt: skip
        if following < groups:
            barrier += 1
            arrive(buffers, call, barrier, rank, tag, ok, RANKS)
        group = following


@triton.jit
def _send(
    buffers, data, x, group, groups, rank, col0, R, C, RANKS: tl.constexpr, SPAN: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write this rank's rows of a group into the inboxes of those who sum them up."""
    for i in tl.static_range(PARTS):
        at = col0 + i * TN
        if SPAN == 1:
            part = load_raw(x, C, 1, group * TM, at, R, C, TM, TN, EVEN)
        for step in tl.static_range(RANKS - 1):
            other = (rank + 1 + step) % RANKS
            if SPAN > 1:
                row0 = (group * SPAN + other) * TM
                part = load_raw(x, C, 1, row0, at, R, C, TM, TN, EVEN)
            inbox = _shared(buffers, other, data, x.dtype.element_ty)
            row0 = _inbox_slot(group, rank, other, RANKS) * TM
            store_tile(inbox, part, row0, at, groups * ((RANKS - 1) * TM), C, EVEN)


@triton.jit
def _sum(
    buffers, data, x, residual, total, group, groups, row0, rank, col0, R, C, ok,
    RANKS: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Sum TM rows from ``row0`` on over all ranks; return FP32 parts, rounded to x's dtype.

    They are kept in ``total``. NaN after a failure.
    """
    inbox = _shared(buffers, rank, data, x.dtype.element_ty)
    rows = groups * ((RANKS - 1) * TM)
    parts = ()
    for i in tl.static_range(PARTS):
        at = col0 + i * TN
        part = tl.zeros((TM, TN), tl.float32)
        for other in tl.static_range(RANKS):
            mine = rank == other
            at_row = _inbox_slot(group, other, rank, RANKS) * TM
            tile = load_tile(tl.where(mine, x, inbox), C, 1, tl.where(mine, row0, at_row), at,
                             tl.where(mine, R, rows), C, TM, TN, EVEN)  # fmt: skip
            part = tile if other == 0 else part + tile
        if residual is not None:
            part += load_tile(residual, C, 1, row0, at, R, C, TM, TN, EVEN)
        parts = parts + (_keep(part, total, ok, row0, at, R, C, x.dtype.element_ty, EVEN),)
    return parts


@triton.jit
def _take_sum(
    buffers, gathered, total, rank, row0, col0, R, C, ok, DTYPE: tl.constexpr, TM: tl.constexpr,
    TN: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load rows that another rank has summed up, as :func:`_sum` returns them."""
    sums = _shared(buffers, rank, gathered, DTYPE)
    parts = ()
    for i in tl.static_range(PARTS):
        at = col0 + i * TN
        part = load_tile(sums, C, 1, row0, at, R, C, TM, TN, EVEN)
        parts = parts + (_keep(part, total, ok, row0, at, R, C, DTYPE, EVEN),)
    return parts


@triton.jit
def _keep(part, total, ok, row0, at, R, C, DTYPE: tl.constexpr, EVEN: tl.constexpr):
    """Round a sum to DTYPE and store it in ``total``; NaN after a failure."""
    part = as_dtype(tl.where(ok, part, float("nan")), DTYPE)
    if total is not None:
        store_tile(total, part, row0, at, R, C, EVEN)
    return part


@triton.jit
def _send_codes(
    buffers, gathered, codes, scales, rank, row0, col0, R, C, RANKS: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Write TM rows' codes and scales to where the other ranks gather them."""
    PER: tl.constexpr = 8 // S.element.bits
    WIDTH: tl.constexpr = 1 if S.row_scaled else TN // BLOCK
    blocks = 1 if S.row_scaled else C // BLOCK
    behind = gathered + _aligned(R, C // PER, codes.dtype.element_ty)
    for i in tl.static_range(PARTS):
        at = (col0 + i * TN) // PER
        block = 0 if S.row_scaled else (col0 + i * TN) // BLOCK
        tile = load_raw(codes, C // PER, 1, row0, at, R, C // PER, TM, TN // PER, EVEN)
        _store_to_others(buffers, gathered, tile, rank, row0, at, R, C // PER, RANKS, EVEN)
        scale = load_raw(scales, blocks, 1, row0, block, R, blocks, TM, WIDTH, EVEN)
        _store_to_others(buffers, behind, scale, rank, row0, block, R, blocks, RANKS, EVEN)


@triton.jit
def _take_codes(
    buffers, gathered, codes, scales, rank, row0, col0, R, C, ok, TM: tl.constexpr,
    TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Copy codes and scales that another rank has made; NaN scales after a failure."""
    PER: tl.constexpr = 8 // S.element.bits
    WIDTH: tl.constexpr = 1 if S.row_scaled else TN // BLOCK
    blocks = 1 if S.row_scaled else C // BLOCK
    behind = gathered + _aligned(R, C // PER, codes.dtype.element_ty)
    theirs = _shared(buffers, rank, gathered, codes.dtype.element_ty)
    their_scales = _shared(buffers, rank, behind, scales.dtype.element_ty)
    for i in tl.static_range(PARTS):
        at = (col0 + i * TN) // PER
        block = 0 if S.row_scaled else (col0 + i * TN) // BLOCK
        tile = load_raw(theirs, C // PER, 1, row0, at, R, C // PER, TM, TN // PER, EVEN)
        store_tile(codes, tile, row0, at, R, C // PER, EVEN)
        scale = load_raw(their_scales, blocks, 1, row0, block, R, blocks, TM, WIDTH, EVEN)
        if scales.dtype.element_ty == tl.float32:
            scale = tl.where(ok, scale, float("nan"))
        else:
            scale = tl.where(ok, scale, 255).to(scales.dtype.element_ty)
        store_tile(scales, scale, row0, block, R, blocks, EVEN)


@triton.jit
def _store_to_others(
    buffers, offset, tile, rank, row0, at, R, C, RANKS: tl.constexpr, EVEN: tl.constexpr
):
    for step in tl.static_range(RANKS - 1):
        other = (rank + 1 + step) % RANKS
        theirs = _shared(buffers, other, offset, tile.dtype)
        store_tile(theirs, tile, row0, at, R, C, EVEN)


@triton.jit
def _inbox_slot(group, source, target, RANKS: tl.constexpr):
    """Return the tile of the target's inbox that is the source's."""
    return group * (RANKS - 1) + (source + RANKS - 1 - target) % RANKS


@triton.jit
def _aligned(rows, columns, DTYPE: tl.constexpr):
    """Return the bytes of a matrix, up to where the next can begin."""
    return (rows.to(tl.int64) * columns * (DTYPE.primitive_bitwidth // 8) + 15) // 16 * 16


@triton.jit
def _shared(buffers, rank, offset, DTYPE: tl.constexpr):
    """Return a place in a rank's buffer, as an aligned pointer."""
    address = tl.load(buffers + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
