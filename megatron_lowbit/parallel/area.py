"""Memory that all ranks of a group on one host can read and write: where the kernel meets."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.parallel.meeting import CLOCKS, PROGRAMS, words
from megatron_lowbit.parallel.paths import flagged_room


class Layout(NamedTuple):
    """Of a rank's area: where a part begins and the bytes of each of its halves, for calls in turn.

    Before ``flagged``, the part for words with a call's number, are those by which ranks meet;
    ``data`` is for everything else. ``size`` is of the whole area, in bytes.
    """

    flagged: tuple[int, int]
    data: tuple[int, int]
    size: int

    @classmethod
    def of(cls, ranks: int, room: int) -> "Layout":
        """With ``room`` bytes for data, each half."""
        flagged = (_aligned(8 * words(ranks)), _aligned(flagged_room(ranks)))
        data = (flagged[0] + 2 * flagged[1], _aligned(room))
        return cls(flagged, data, data[0] + 2 * data[1])


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


@dataclass
class Area:
    """One rank's part and the addresses of all.

    ``addresses`` (int64, by rank) and ``state`` (int64) are on the device, ``fault`` (int64) in
    memory that the CPU reads as well. ``owner`` keeps the memory alive.
    """

    addresses: Tensor
    rank: int
    layout: Layout
    fault: Tensor
    owner: Any
    state: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = CLOCKS.value + PROGRAMS.value
        self.state = torch.zeros(size, dtype=torch.int64, device=self.addresses.device)

    @property
    def ranks(self) -> int:
        """Of the group."""
        return len(self.addresses)

    @property
    def room(self) -> int:
        """Bytes that a call can use for data."""
        return self.layout.data[1]


def symmetric_area(group: dist.ProcessGroup, room: int) -> Area:
    """An area for a group of GPUs that can map one another's memory. All ranks call it together."""
    import torch.distributed._symmetric_memory as symmetric_memory

    layout = Layout.of(group.size(), room)
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric_memory.empty(layout.size, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric_memory.rendezvous(memory, group)
    fault = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    dist.barrier(group)  # no rank writes into an area that is still to be zeroed
    return Area(addresses, group.rank(), layout, fault, (memory, handle))
