"""Memory that all ranks of a group on one host can read and write: where the kernel meets."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.collectives.barrier import CLOCKS, PROGRAMS, words


@dataclass
class SymmetricBuffer:
    """One rank's part and the addresses of all.

    ``addresses`` (int64, by rank) and ``state`` (int64) are on the device, ``fault`` (int64) in
    memory that the CPU reads as well. Shared data begin at byte ``data`` of a buffer and have
    ``size`` bytes, twice. ``owner`` keeps the memory alive; ``captured``: graphs use it.
    """

    addresses: Tensor
    rank: int
    data: int
    size: int
    fault: Tensor
    owner: Any
    captured: bool = False
    state: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = CLOCKS.value + PROGRAMS.value
        self.state = torch.zeros(size, dtype=torch.int64, device=self.addresses.device)

    @property
    def ranks(self) -> int:
        """Number of ranks of the group."""
        return len(self.addresses)


def layout(ranks: int, size: int) -> tuple[int, int]:
    """Return where a buffer's data begin, and its whole size, in bytes."""
    data = -(-8 * words(ranks) // 256) * 256
    return data, data + 2 * size


def allocate(group: dist.ProcessGroup, size: int) -> SymmetricBuffer:
    """Allocate a buffer on GPUs that can map one another's memory; all ranks call it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    size = -(-size // 256) * 256
    data, total = layout(group.size(), size)
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric_memory.rendezvous(memory, group)
    fault = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    dist.barrier(group)  # no rank writes into a buffer that is still to be zeroed
    return SymmetricBuffer(addresses, group.rank(), data, size, fault, (memory, handle))
