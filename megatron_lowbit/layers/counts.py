"""Numbers of the tokens of each expert, which need not leave the device."""

from collections.abc import Sequence

from torch import Tensor


class DeviceCounts:
    """Numbers of tokens that the CPU does not know yet.

    Args:
        counts: (E,), int64, the number of tokens of each expert, on any device.
        rows: their sum.
    """

    def __init__(self, counts: Tensor, rows: int) -> None:
        self.counts, self.rows = counts, rows
        self._on_host: list[int] | None = None

    def tolist(self) -> "DeviceCounts":
        """Return the object itself, where Megatron-LM's grouped MLP asks a tensor for a list."""
        return self

    def on_host(self) -> list[int]:
        """Return the numbers; the first call waits for the device and copies them."""
        if self._on_host is None:
            self._on_host = self.counts.tolist()
        return self._on_host


def counts_on_host(tokens_per_expert: Sequence[int] | DeviceCounts) -> list[int]:
    """Return numbers of tokens as a list, for which those on a device are copied."""
    if isinstance(tokens_per_expert, DeviceCounts):
        return tokens_per_expert.on_host()
    return list(tokens_per_expert)
