"""Path of a message by its size, and the memory that paths need."""

from megatron_lowbit.kernels.routes import WIDEST_ROW

ONE_STAGE, COMPACT, GATHERED = PATHS = ("one-stage", "compact", "gathered")
"""Names of the paths, in the order of the kernel's numbers."""
ONE_STAGE_BYTES = {2: 2**40, 4: 2**20, 8: 2**18}
"""Up to how many bytes of x every rank sums up everything by itself, by ranks; 8 not measured."""


def choose_path(ranks: int, size: int, compact: bool) -> str:
    """Choose the fastest path, by measurement, for ``size`` bytes of x.

    ``compact``: the sum itself is not wanted, and codes are.
    """
    if size <= _one_stage_bytes(ranks):
        return ONE_STAGE
    return COMPACT if compact else GATHERED


def bytes_of_paths(ranks: int, capacity: int) -> int:
    """Return the bytes for messages of up to ``capacity`` bytes on the paths chosen for them."""
    small = min(capacity, _one_stage_bytes(ranks))
    slack = ranks * 4 * WIDEST_ROW  # of tiles that reach beyond x
    return max((ranks - 1) * small, 2 * capacity if capacity > small else 0) + slack


def _one_stage_bytes(ranks: int) -> int:
    """Return the table's entry for the next smaller number of ranks in it."""
    return ONE_STAGE_BYTES[max((r for r in ONE_STAGE_BYTES if r <= ranks), default=2)]
