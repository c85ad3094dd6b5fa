"""Device functions: programs of the same number on all ranks wait for one another.

Each rank has an area that all others can write. A program tells another rank that it has come by
one word in that rank's area, the number of the call above a tag of what was called with; it waits
for the words of all ranks in its own. Areas hold the words of two calls in turn: a rank may be a
call ahead, never two, since it waits for this one's word in between.

Waiting ends: after a time limit, or where a rank calls with another tag. What was wrong goes into
``fault``, which the CPU reads, and the operation is broken from then on: no later call waits.
"""

import triton
import triton.language as tl

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)

PROGRAMS = tl.constexpr(512)
"""The most programs of a launch."""
MEETINGS = tl.constexpr(2)
"""Of one call, at most."""
HEADER = tl.constexpr(2)
"""Words by which a rank says in full what shape it was called with: the call, the shape."""
LATE, OTHER = tl.constexpr(1), tl.constexpr(2)
"""What can be wrong: a rank did not come; a rank came with another call."""

CALLS, DONE, BROKEN, CLOCKS = (tl.constexpr(word) for word in range(4))
"""Words of a rank's own state: calls so far, programs of this one that are done, whether broken;
and a clock for each program."""
_POLLS = tl.constexpr(1024)
"""Between looks at the clock."""


def words(ranks: int) -> int:
    """int64 words at the start of an area."""
    per_call = MEETINGS.value * PROGRAMS.value * ranks + HEADER.value * ranks
    return 2 * per_call


@triton.jit
def begin(state):
    """The number of this call, int64, and whether all is well so far."""
    call = tl.load(state + CALLS, volatile=True) + 1
    return call, tl.load(state + BROKEN, volatile=True) == 0


@triton.jit
def introduce(areas, call, rank, shape, RANKS: tl.constexpr, PADDED: tl.constexpr):
    """Tell all ranks the shape that this one was called with: rows << 32 | columns."""
    others = tl.arange(0, PADDED)
    is_rank = others < RANKS
    words = _area(areas, others, is_rank) + _header(call, rank, RANKS)
    tl.store(words + 1, shape + tl.zeros_like(others), mask=is_rank)
    word = call << 32
    tl.atomic_xchg(words, word + tl.zeros_like(others), mask=is_rank, sem="release", scope="sys")


@triton.jit
def meet(
    areas, state, fault, call, rank, tag, shape, limit, well, MEETING: tl.constexpr,
    RANKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Wait until this program of all ranks has come; what they wrote before can be read then.

    ``limit`` is in ns on a GPU, in polls elsewhere. Gives whether all is still well.
    """
    tl.debug_barrier()  # all of this program's writes come before its word
    program = tl.program_id(0)
    others = tl.arange(0, PADDED)
    is_rank = others < RANKS
    slot = ((call & 1) * MEETINGS + MEETING) * PROGRAMS + program
    word = ((call << 32) | tag) + tl.zeros_like(others)
    theirs = _area(areas, others, is_rank) + slot * RANKS + rank
    tl.atomic_xchg(theirs, word, mask=is_rank, sem="release", scope="sys")
    mine = _area(areas, rank + tl.zeros_like(others), is_rank) + slot * RANKS + others
    seen = _look(mine, is_rank, word)
    missing = _missing(seen, call)
    polls = call * 0
    start = polls
    while missing & well:
        seen = _look(mine, is_rank, word)
        missing = _missing(seen, call)
        polls += 1
        if polls % _POLLS == 0:
            now = _clock(state, program, polls)
            start = tl.where(polls == _POLLS, now, start)
            if missing & (now - start > limit):
                _report(fault, state, LATE, _first((seen >> 32) < call), shape, call * 0)
            well = well & (now - start <= limit)
    differs = (seen & 0xFFFFFFFF) != tag
    other = well & (tl.max(differs.to(tl.int32), 0) > 0)
    if other:
        _report_other(areas, fault, state, call, rank, _first(differs), shape, RANKS)
    tl.debug_barrier()
    return well & (other == 0)


@triton.jit
def end(state, call):
    """Count the call, once all of its programs are done."""
    tl.debug_barrier()
    done = tl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(state + DONE, 0)
        tl.store(state + CALLS, call)


@triton.jit
def _area(areas, ranks, mask):
    """The starts of ranks' areas, as pointers to int64."""
    return tl.load(areas + ranks, mask=mask, other=0).to(tl.pointer_type(tl.int64))


@triton.jit
def _header(call, rank, RANKS: tl.constexpr):
    """Where a rank's introductions stand in an area."""
    WORDS: tl.constexpr = 2 * MEETINGS * PROGRAMS * RANKS
    return WORDS + ((call & 1) * RANKS + rank) * HEADER


@triton.jit
def _look(words, mask, other):
    # Not a load: all threads are to see the same. No word is negative.
    seen = tl.atomic_max(words, other * 0, mask=mask, sem="acquire", scope="sys")
    return tl.where(mask, seen, other)


@triton.jit
def _missing(seen, call):
    return tl.min(seen >> 32, 0) < call


@triton.jit
def _first(condition):
    """The least index where it holds."""
    index = tl.arange(0, condition.shape[0])
    return tl.min(tl.where(condition, index, condition.shape[0]), 0)


@triton.jit
def _report_other(areas, fault, state, call, rank, who, shape, RANKS: tl.constexpr):
    """Report a rank that came with another call, by its introduction, which may still be due."""
    mine = tl.load(areas + rank).to(tl.pointer_type(tl.int64)) + _header(call, who, RANKS)
    word = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    polls = 0
    while ((word >> 32) < call) & (polls < _POLLS * _POLLS):
        word = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
        polls += 1
    _report(fault, state, OTHER, who, shape, tl.load(mine + 1))


@triton.jit
def _report(fault, state, what, who, shape, their_shape):
    """Write what is wrong; all programs of a rank that do so write much the same."""
    words = fault.to(tl.pointer_type(tl.int64))
    tl.store(words + 1, who.to(tl.int64))
    tl.store(words + 2, shape)
    tl.store(words + 3, their_shape)
    tl.debug_barrier()
    tl.atomic_xchg(words, what + who.to(tl.int64) * 0, sem="release", scope="sys")
    tl.store(state + BROKEN, 1)


@triton.jit
def _clock(state, program, polls):
    """The time in ns, the same in all threads; elsewhere than on a GPU the polls so far."""
    if ON_GPU:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
        tl.atomic_xchg(state + CLOCKS + program, now)
        return tl.atomic_add(state + CLOCKS + program, 0)
    else:
        return polls
