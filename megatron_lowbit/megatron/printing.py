"""Lines that the first rank prints."""

from megatron.training.utils import print_rank_0

from megatron_lowbit.errors import printable


def say_on_rank_0(line: str) -> None:
    """Print a line on the first rank, with control characters escaped."""
    print_rank_0(printable(line))
