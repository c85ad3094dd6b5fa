"""All-reduce, residual, norm and quantization of rows in one kernel, over memory that ranks share.

Source: the three dispatch paths of Modular's "allreduce_residual_rmsnorm". Every rank copies its
partial rows to where the others can read them, and rows are summed up in FP32, rank after rank, the
residual last, and rounded once to x's dtype: that is the new residual, and what is normalized.

    ONE_STAGE   each rank sums up all rows by itself
    COMPACT     each rank sums up, normalizes and quantizes its share; codes and scales are gathered
    GATHERED    each rank sums up its share; the sums are gathered, normalized on arrival

All give the same bits on all ranks: the same numbers are added in the same order everywhere. Where
the new residual is wanted, gathering it alone moves less than gathering it and the codes.
"""

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import as_dtype
from megatron_lowbit.kernels.norm import finish_rows
from megatron_lowbit.kernels.tiles import load_raw, load_tile, store_tile
from megatron_lowbit.parallel.meeting import begin, end, meet

ONE_STAGE, COMPACT, GATHERED = (tl.constexpr(path) for path in range(3))


@triton.jit(do_not_specialize=["R", "rank", "tag", "shape", "limit", "constant", "eps"])
def all_reduce_norm_kernel(
    x, residual, total, R, C, gain, constant, eps, y, most, amax, codes, scales, tensor_scale,
    areas, state, fault, rank, tag, shape, limit, data, half,
    RANKS: tl.constexpr, PADDED: tl.constexpr, PATH: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x (R, C), contiguous: tiles of TM rows in groups, one tile for each rank but in ONE_STAGE.

    ``total`` is the sum with the residual, ``y`` that normalized, the rest as in ``finish_rows``.
    An area's shared data begin after ``data`` bytes: twice, for calls in turn, ``half`` bytes for
    the copy of x and then what is gathered.
    """
    SPAN: tl.constexpr = 1 if PATH == ONE_STAGE else RANKS
    groups = tl.cdiv(tl.cdiv(R, TM), SPAN)
    group, programs = tl.program_id(0), tl.num_programs(0)
    # Always 0, in a form that says that loads are aligned.
    col0 = tl.program_id(1) * TN
    call, meeting, well = begin(areas, state, rank, shape, RANKS)
    # Some programs have a group less; the next call's numbers are those of all.
    after = meeting + tl.cdiv(groups, programs) * (1 if PATH == ONE_STAGE else 2)
    data += (call & 1) * half
    gathered = data + _aligned(R, C * (x.dtype.element_ty.primitive_bitwidth // 8))
    # Group by group: while some programs wait or read from others, some use their own memory.
    while group < groups:
        _copy(areas, data, x, group * SPAN, rank, col0, R, C, SPAN, TM, TN, PARTS, EVEN)
        meeting += 1
        well = meet(areas, state, fault, call, meeting, rank, tag, shape, limit, well, RANKS,
                    PADDED)  # fmt: skip
        if PATH == ONE_STAGE:
            parts = _sum(areas, data, 0, x, residual, total, group * TM, col0, R, C, well, RANKS,
                         TM, TN, PARTS, EVEN)  # fmt: skip
            finish_rows(parts, group * TM, col0, R, C, gain, constant, eps, y, None, most, amax,
                        codes, scales, tensor_scale, TM, TN, PARTS, BLOCK, P, S, EVEN)  # fmt: skip
        else:
            _share(areas, data, gathered, x, residual, (group * RANKS + rank) * TM, rank, col0, R,
                   C, gain, constant, eps, codes, scales, tensor_scale, well, RANKS, PATH, TM, TN,
                   PARTS, BLOCK, P, S, EVEN)  # fmt: skip
            meeting += 1
            well = meet(areas, state, fault, call, meeting, rank, tag, shape, limit, well, RANKS,
                        PADDED)  # fmt: skip
            for member in range(RANKS):
                row0 = (group * RANKS + member) * TM
                if PATH == COMPACT:
                    _fetch(areas, gathered, member, codes, scales, row0, col0, R, C, well, TM, TN,
                           PARTS, BLOCK, S, EVEN)  # fmt: skip
                else:
                    # Of one rank: what it has summed up.
                    parts = _sum(areas, gathered, member, x, None, total, row0, col0, R, C, well,
                                 1, TM, TN, PARTS, EVEN)  # fmt: skip
                    finish_rows(parts, row0, col0, R, C, gain, constant, eps, y, None, most, amax,
                                codes, scales, tensor_scale, TM, TN, PARTS, BLOCK, P, S,
                                EVEN)  # fmt: skip
        group += programs
    end(state, call, after)


@triton.jit
def _copy(
    areas, data, x, tile, rank, col0, R, C, SPAN: tl.constexpr, TM: tl.constexpr,
    TN: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Copy SPAN tiles of rows from ``tile`` on to where the other ranks can read them."""
    copy = _shared(areas, rank, data, x.dtype.element_ty)
    for member in range(SPAN):
        row0 = (tile + member) * TM
        for i in tl.static_range(PARTS):
            at = col0 + i * TN
            part = load_raw(x, C, 1, row0, at, R, C, TM, TN, EVEN)
            store_tile(copy, part, row0, at, R, C, EVEN)


@triton.jit
def _share(
    areas, data, gathered, x, residual, row0, rank, col0, R, C, gain, constant, eps, codes, scales,
    tensor_scale, well, RANKS: tl.constexpr, PATH: tl.constexpr, TM: tl.constexpr,
    TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Sum up this rank's tile of the rows, and put what is gathered where others can read it."""
    if PATH == COMPACT:
        parts = _sum(areas, data, 0, x, residual, None, row0, col0, R, C, well, RANKS, TM, TN,
                     PARTS, EVEN)  # fmt: skip
        my_codes = _shared(areas, rank, gathered, codes.dtype.element_ty)
        my_scales = _scales_after(areas, rank, gathered, scales, R, C, S)
        finish_rows(parts, row0, col0, R, C, gain, constant, eps, None, None, None, None,
                    my_codes, my_scales, tensor_scale, TM, TN, PARTS, BLOCK, P, S,
                    EVEN)  # fmt: skip
    else:
        sums = _shared(areas, rank, gathered, x.dtype.element_ty)
        _sum(areas, data, 0, x, residual, sums, row0, col0, R, C, well, RANKS, TM, TN, PARTS,
             EVEN)  # fmt: skip


@triton.jit
def _sum(
    areas, data, first, x, residual, total, row0, col0, R, C, well, RANKS: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Rows summed up over RANKS from ``first`` on, rounded to x's dtype, as FP32 parts.

    They are kept in ``total``. NaN where all is not well.
    """
    parts = ()
    for i in tl.static_range(PARTS):
        at = col0 + i * TN
        part = tl.zeros((TM, TN), tl.float32)
        for other in tl.static_range(RANKS):
            theirs = _shared(areas, first + other, data, x.dtype.element_ty)
            tile = load_tile(theirs, C, 1, row0, at, R, C, TM, TN, EVEN)
            part = tile if other == 0 else part + tile
        if residual is not None:
            part += load_tile(residual, C, 1, row0, at, R, C, TM, TN, EVEN)
        part = as_dtype(tl.where(well, part, float("nan")), x.dtype.element_ty)
        if total is not None:
            store_tile(total, part, row0, at, R, C, EVEN)
        parts = parts + (part,)
    return parts


@triton.jit
def _fetch(
    areas, gathered, owner, codes, scales, row0, col0, R, C, well, TM: tl.constexpr,
    TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Copy codes and scales that their owner made; NaN scales where all is not well."""
    PER: tl.constexpr = 8 // S.element.bits
    theirs = _shared(areas, owner, gathered, codes.dtype.element_ty)
    their_scales = _scales_after(areas, owner, gathered, scales, R, C, S)
    for i in tl.static_range(PARTS):
        at, block = (col0 + i * TN) // PER, (col0 + i * TN) // BLOCK
        tile = load_raw(theirs, C // PER, 1, row0, at, R, C // PER, TM, TN // PER, EVEN)
        store_tile(codes, tile, row0, at, R, C // PER, EVEN)
        few = load_raw(their_scales, C // BLOCK, 1, row0, block, R, C // BLOCK, TM, TN // BLOCK,
                       EVEN)  # fmt: skip
        if scales.dtype.element_ty == tl.float32:
            few = tl.where(well, few, float("nan"))
        else:
            few = tl.where(well, few, 255).to(scales.dtype.element_ty)
        store_tile(scales, few, row0, block, R, C // BLOCK, EVEN)


@triton.jit
def _scales_after(areas, rank, gathered, scales, R, C, S: tl.constexpr):
    """Where a rank's scales are shared: behind its codes."""
    behind = gathered + _aligned(R, C // (8 // S.element.bits))
    return _shared(areas, rank, behind, scales.dtype.element_ty)


@triton.jit
def _aligned(rows, size):
    """Bytes of so many rows of a size, to where the next can begin."""
    return (rows.to(tl.int64) * size + 15) // 16 * 16


@triton.jit
def _shared(areas, rank, offset, DTYPE: tl.constexpr):
    """A place in a rank's area, as an aligned pointer."""
    address = tl.load(areas + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
