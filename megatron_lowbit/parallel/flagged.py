"""The same for small messages: every rank sums up all rows, and no one waits for a fence.

Whatever is written into another rank's memory goes in words of 8 bytes, 4 of them the number of the
call: who reads a word sees whether it has come. NCCL's LL protocol does so. It takes twice the
bytes, and one way across the link where data, fence and word after one another take three.
"""

import triton
import triton.language as tl

from megatron_lowbit.kernels.norm import finish_rows
from megatron_lowbit.kernels.tiles import load_raw, load_tile, store_tile
from megatron_lowbit.parallel.kernel import keep, letter, shared
from megatron_lowbit.parallel.meeting import (
    POLLS,
    TAGS,
    arrive,
    begin,
    count,
    is_behind,
    patience,
    report_other,
    slot,
)

COMPLETE, MISSING, BEHIND, DIFFERS, BROKEN = (tl.constexpr(status) for status in range(5))
"""Of a tile of another rank: all of it has come; not all; the rank has not said that it has come;
it has come with another call; it had found something wrong."""


@triton.jit(do_not_specialize=["R", "rank", "tag", "shape", "limit", "constant", "eps"])
def flagged_kernel(
    x, residual, total, R, C, gain, constant, eps, y, most, amax, codes, scales, tensor_scale,
    areas, state, fault, rank, tag, shape, limit, data, half,
    RANKS: tl.constexpr, PADDED: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x (R, C), a tile of TM rows for each program; the rest as in ``all_reduce_norm_kernel``.

    Here ``data`` and ``half`` are of the part of an area where nothing but such words is written.
    """
    group, groups = tl.program_id(0), tl.num_programs(0)
    # Always 0, in a form that says that loads are aligned.
    row0, col0 = group * TM, tl.program_id(1) * TN
    PER: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
    # Before all else: it takes as long as to look up the call's number.
    mine = _fours(x, row0, col0, R, C, TM, TN, PARTS, PER, EVEN)
    call, well = begin(areas, state, rank, shape, RANKS)
    # That all came with the same call is told by itself: no word of data says so.
    arrive(areas, call, 0, rank, tag, well, RANKS, PADDED, False)
    data += (call & 1) * half
    for i in tl.static_range(PARTS):
        word = mine[i] | (call << 32)
        for step in tl.static_range(RANKS - 1):
            other = (rank + 1 + step) % RANKS
            inbox = shared(areas, other, data, tl.int64)
            store_tile(inbox, word, letter(group, rank, other, RANKS) * TM,
                       (col0 + i * TN) // PER, groups * ((RANKS - 1) * TM), C // PER,
                       EVEN)  # fmt: skip
    count(state)
    inbox, words = shared(areas, rank, data, tl.int64), shared(areas, rank, 0, tl.int64)
    parts = ()
    for i in tl.static_range(PARTS):
        at = col0 + i * TN
        part = tl.zeros((TM, TN), tl.float32)
        for other in tl.static_range(RANKS):
            tile = mine[i]
            if other != rank:
                start = inbox + letter(group, other, rank, RANKS) * (TM * (C // PER))
                tile, well = _receive(
                    start, words + slot(call, other, RANKS), areas, state, fault, call, other,
                    tag, shape, limit, at // PER, R - row0, C // PER, well, RANKS, TM, TN // PER,
                )  # fmt: skip
            tile = _values(tile, TM, TN, PER)
            part = tile if other == 0 else part + tile
        if residual is not None:
            part += load_tile(residual, C, 1, row0, at, R, C, TM, TN, EVEN)
        parts = parts + (keep(part, total, well, row0, at, R, C, x.dtype.element_ty, EVEN),)
    finish_rows(parts, row0, col0, R, C, gain, constant, eps, y, None, most, amax, codes, scales,
                tensor_scale, TM, TN, PARTS, BLOCK, P, S, EVEN)  # fmt: skip


@triton.jit
def _fours(
    x, row0, col0, R, C, TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr,
    PER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of x, each 4 bytes the low ones of a word, in parts [TM, TN // PER]."""
    parts = ()
    for i in tl.static_range(PARTS):
        tile = load_raw(x, C, 1, row0, col0 + i * TN, R, C, TM, TN, EVEN)
        if PER == 1:
            word = tile.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        else:
            twos = tile.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
            low, high = tl.split(tl.reshape(twos, (TM, TN // 2, 2)))
            word = low | (high << 16)
        parts = parts + (word,)
    return parts


@triton.jit
def _values(words, TM: tl.constexpr, TN: tl.constexpr, PER: tl.constexpr):
    """The FP32 or BF16 numbers in words' low 4 bytes, in FP32, [TM, TN]."""
    four = words.to(tl.int32)
    if PER == 1:
        return four.to(tl.float32, bitcast=True)
    else:
        low = (four << 16).to(tl.float32, bitcast=True)
        high = (four & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low, high), (TM, TN))


@triton.jit
def _receive(
    start, come, areas, state, fault, call, other, tag, shape, limit, at, R, C, well,
    RANKS: tl.constexpr, TM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Another rank's words, [TM, N], once all of them have come; whether all is well.

    ``come`` is where that rank says what it was called with.
    """
    r, c = tl.arange(0, TM)[:, None], at + tl.arange(0, N)[None, :]
    words, inside = start + r * C + c, (r < R) & (c < C)
    word = tl.load(words, mask=inside, other=call << 32, volatile=True)
    status = _status(tl.load(come, volatile=True), word, call, tag)
    polls, waited = call * 0, call * 0
    while (status > COMPLETE) & (status < DIFFERS) & well:
        word = tl.load(words, mask=inside, other=call << 32, volatile=True)
        status = _status(tl.load(come, volatile=True), word, call, tag)
        polls += 1
        if polls % POLLS == 0:
            waited, well = patience(state, fault, polls, waited, limit, 1, polls * 0 + other, shape)
    differs = well & (status >= DIFFERS)
    if differs:
        who, broken = polls * 0 + other, status == BROKEN
        report_other(areas, fault, state, call, who, broken, shape, RANKS)
    return word, well & (differs == 0)


@triton.jit
def _status(come, word, call, tag):
    """The most that any thread sees, so that all go on together."""
    theirs = come & TAGS
    said = tl.where(theirs == tag, COMPLETE, tl.where(theirs == 0, BROKEN, DIFFERS))
    said = tl.where(is_behind(come, call, 0) > 0, BEHIND, said)
    missing = ((word >> 32) ^ call) & 0xFFFFFFFF != 0
    return tl.max(tl.maximum(tl.where(missing, MISSING, COMPLETE), said))
