"""Memory that all ranks of a group on one host can read and write: where the kernel meets."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.parallel.meeting import CLOCKS, PROGRAMS, words


@dataclass
class Area:
    """One rank's part and the addresses of all.

    ``addresses`` (int64, by rank) and ``state`` (int64) are on the device, ``fault`` (int64) in
    memory that the CPU reads as well. Shared data begin at byte ``data`` of an area and have
    ``room`` bytes, twice. ``owner`` keeps the memory alive; ``captured``: graphs use it.
    """

    addresses: Tensor
    rank: int
    data: int
    room: int
    fault: Tensor
    owner: Any
    captured: bool = False
    state: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = CLOCKS.value + PROGRAMS.value
        self.state = torch.zeros(size, dtype=torch.int64, device=self.addresses.device)

    @property
    def ranks(self) -> int:
        """Of the group."""
        return len(self.addresses)


def layout(ranks: int, room: int) -> tuple[int, int]:
    """Where an area's data begin, and its whole size, in bytes."""
    data = -(-8 * words(ranks) // 256) * 256
    return data, data + 2 * room


def symmetric_area(group: dist.ProcessGroup, room: int) -> Area:
    """An area for a group of GPUs that can map one another's memory. All ranks call it together."""
    import torch.distributed._symmetric_memory as symmetric_memory

    room = -(-room // 256) * 256
    data, size = layout(group.size(), room)
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric_memory.rendezvous(memory, group)
    fault = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    dist.barrier(group)  # no rank writes into an area that is still to be zeroed
    return Area(addresses, group.rank(), data, room, fault, (memory, handle))
