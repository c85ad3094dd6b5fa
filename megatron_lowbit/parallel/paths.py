"""Which path a message takes, by its size, and the memory that paths need."""

from megatron_lowbit.kernels.norm import WIDEST

FLAGGED, ONE_STAGE, COMPACT, GATHERED = PATHS = ("flagged", "one-stage", "compact", "gathered")
FLAGGED_BYTES = {2: 2**18, 4: 2**16, 8: 2**15}
"""Up to how many bytes of x every 4 travel with the number of the call, by ranks."""
ONE_STAGE_BYTES = {2: 2**40, 4: 2**18, 8: 2**17}
"""Up to how many bytes of x every rank sums up everything by itself, by ranks."""


def choose_path(ranks: int, size: int, flags: bool, compact: bool) -> str:
    """The fastest path, by measurement, for ``size`` bytes of x.

    ``flags``: x can be read in pieces of 4 bytes. ``compact``: the sum itself is not wanted, and
    codes are.
    """
    if flags and size <= most(FLAGGED_BYTES, ranks):
        return FLAGGED
    if size <= most(ONE_STAGE_BYTES, ranks):
        return ONE_STAGE
    return COMPACT if compact else GATHERED


def most(table: dict[int, int], ranks: int) -> int:
    """What a table says for so many ranks: that of the next smaller number in it."""
    return table[max((r for r in table if r <= ranks), default=2)]


def flagged_room(ranks: int) -> int:
    """Bytes for the largest message that is flagged, from all other ranks."""
    return 2 * (ranks - 1) * most(FLAGGED_BYTES, ranks)


def room(ranks: int, capacity: int) -> int:
    """Bytes for messages of ``capacity`` bytes on the other paths that are chosen for them."""
    small = min(capacity, most(ONE_STAGE_BYTES, ranks))
    slack = ranks * 4 * WIDEST  # of tiles that reach beyond x
    return max((ranks - 1) * small, 2 * capacity if capacity > small else 0) + slack
