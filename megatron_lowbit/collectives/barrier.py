"""Cross-rank barrier between programs with the same index, as device functions.

Each rank has a buffer that all others can write. A program tells another rank that it has come by
one word in that rank's buffer, the number of the barrier above a tag of what was called with; it
waits for the words of all ranks in its own. A rank may be a barrier ahead, whose number is then
larger, or a call, which has its own words: buffers hold two calls' words in turn. It is never two
ahead, since it waits for this one's word in between.

Waiting ends: after a time limit, or where a rank calls with another tag. What was wrong goes into
``fault``, which the CPU reads, and the operation is broken from then on: no later call waits, and
its words say so.
"""

import triton
import triton.language as tl

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)

PROGRAMS = tl.constexpr(1024)
"""The most programs of a launch."""
BARRIERS = tl.constexpr(512)
"""The most barriers of a program in a call."""
TAG_BITS = tl.constexpr(23)
"""Bits of the tag in a word; those above number barriers, enough for 2^31 calls. No tag is 0."""
TAGS = tl.constexpr((1 << TAG_BITS.value) - 1)
LATE, OTHER, BROKEN = (tl.constexpr(failure) for failure in range(1, 4))
"""Failures: a rank did not come; came with another call; had failed before."""

BEGUN, WRONG, CLOCKS = (tl.constexpr(word) for word in range(3))
"""Words of a rank's own state: PROGRAMS for each call so far; whether something is wrong; and a
clock for each program."""
_POLLS = tl.constexpr(1024)
"""Between looks at the clock."""


@triton.jit
def begin(buffers, state, rank, shape, RANKS: tl.constexpr):
    """Return the number of this call, int64, and True if none failed so far.

    ``shape``, rows << 32 | columns, is what another rank is shown that came with another one.
    """
    call = tl.load(state + BEGUN, volatile=True) // PROGRAMS + 1
    ok = tl.load(state + WRONG, volatile=True) == 0
    # Where something is wrong, the shape of the call that it was wrong with stays.
    tl.store(_shape_of(buffers, rank, call, RANKS), shape, mask=ok)
    return call, ok


@triton.jit
def count(state):
    """Count this program, whose threads have all used the number of the call.

    Programs of a call add up to PROGRAMS with the last one to count, and to less before: whoever
    begins meanwhile reads the same number. No one waits for the sum.
    """
    tl.debug_barrier()
    others = tl.num_programs(0) - 1
    share = tl.where(tl.program_id(0) == 0, PROGRAMS - others, 1)
    tl.atomic_add(state + BEGUN, share.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def arrive(buffers, call, barrier, rank, tag, ok, RANKS: tl.constexpr):
    """Tell all ranks that this program has come; what it wrote before can be read then."""
    tl.debug_barrier()  # all of this program's writes come before its word
    others = tl.arange(0, triton.next_power_of_2(RANKS))
    is_rank = others < RANKS
    word = _word(call, barrier, tl.where(ok, tag, 0)) + tl.zeros_like(others)
    words = _buffer(buffers, others, is_rank) + _slot(call, rank, RANKS)
    tl.atomic_xchg(words, word, mask=is_rank, sem="release", scope="sys")


@triton.jit
def wait(
    buffers, state, fault, call, barrier, rank, tag, shape, limit, ok, RANKS: tl.constexpr
):  # fmt: skip
    """Wait until this program of all ranks has come.

    ``limit`` is in ns on a GPU, in polls elsewhere. Gives whether all ranks are still in order.
    """
    others = tl.arange(0, triton.next_power_of_2(RANKS))
    is_rank = others < RANKS
    word = _word(call, barrier, tag) + tl.zeros_like(others)
    mine = _buffer(buffers, rank + tl.zeros_like(others), is_rank) + _slot(call, others, RANKS)
    number = call * BARRIERS + barrier
    seen = _look(mine, is_rank, word)
    missing = tl.min(seen >> TAG_BITS, 0) < number
    polls, start = call * 0, call * 0
    while missing & ok:
        seen = _look(mine, is_rank, word)
        missing = tl.min(seen >> TAG_BITS, 0) < number
        polls += 1
        if polls % _POLLS == 0:
            now = _clock(state, polls)
            start = tl.where(polls == _POLLS, now, start)
            late = missing & (now - start > limit)
            if late:
                who = _first((seen >> TAG_BITS) < number)
                _report(fault, state, LATE, who, shape, polls * 0)
            # Another program may have found that no one will come.
            ok = (late == 0) & (tl.atomic_add(state + WRONG, 0) == 0)
    theirs = seen & TAGS
    differs = ok & (tl.max((theirs != tag).to(tl.int32), 0) > 0)
    if differs:
        who = _first(theirs != tag)
        what = tl.where(_first(theirs == 0) == who, BROKEN, OTHER)
        their_shape = tl.load(_shape_of(buffers, who, call, RANKS), volatile=True)
        _report(fault, state, what, who, shape, their_shape)
    tl.debug_barrier()
    return ok & (differs == 0)


@triton.jit
def _slot(call, rank, RANKS: tl.constexpr):
    """Return the place of a rank's word for this program in a buffer."""
    return ((call & 1) * PROGRAMS + tl.program_id(0)) * RANKS + rank


@triton.jit
def _report(fault, state, what, who, shape, their_shape):
    """Write what is wrong, unless another program of this rank has done so."""
    if tl.atomic_xchg(state + WRONG, 1, sem="relaxed") == 0:
        words = fault.to(tl.pointer_type(tl.int64))
        tl.store(words + 1, who.to(tl.int64))
        tl.store(words + 2, shape)
        tl.store(words + 3, their_shape)
        tl.debug_barrier()
        tl.atomic_xchg(words, what + who.to(tl.int64) * 0, sem="release", scope="sys")


@triton.jit
def _word(call, barrier, tag):
    return ((call * BARRIERS + barrier) << TAG_BITS) + tag


@triton.jit
def _buffer(buffers, ranks, mask):
    """Return the starts of ranks' buffers, as pointers to int64."""
    return tl.load(buffers + ranks, mask=mask, other=0).to(tl.pointer_type(tl.int64))


@triton.jit
def _shape_of(buffers, rank, call, RANKS: tl.constexpr):
    """Return the place where a rank says with which shape it was called."""
    buffer = tl.load(buffers + rank).to(tl.pointer_type(tl.int64))
    return buffer + 2 * PROGRAMS * RANKS + (call & 1)


@triton.jit
def _look(words, mask, other):
    # Not a load: all threads are to see the same. No word is negative.
    seen = tl.atomic_max(words, other * 0, mask=mask, sem="acquire", scope="sys")
    return tl.where(mask, seen, other)


@triton.jit
def _first(condition):
    """Return the least index where a condition holds."""
    index = tl.arange(0, condition.shape[0])
    return tl.min(tl.where(condition, index, condition.shape[0]), 0)


@triton.jit
def _clock(state, polls):
    """Return the time in ns, the same in all threads; elsewhere than on a GPU the polls so far."""
    if ON_GPU:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
        clock = state + CLOCKS + tl.program_id(0)
        tl.atomic_xchg(clock, now)
        return tl.atomic_add(clock, 0)
    else:
        return polls
