"""Check whether the ranks of a group can read and write one another's memory."""

import socket

import torch
import torch.distributed as dist


def missing_peers(group: dist.ProcessGroup) -> str | None:
    """Return why the ranks of a group cannot share memory; None where they can.

    All ranks call it together, and all get the same answer.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    found: list = [None] * group.size()
    dist.all_gather_object(found, (socket.gethostname(), device), group=group)
    devices = sorted({device for _, device in found if device is not None})
    if any(device is None for _, device in found):
        return "not every rank has a GPU"
    if len({host for host, _ in found}) > 1:
        return "its ranks are on several hosts"
    if len(devices) < len(found):
        return "some ranks share a GPU"
    for one in devices:
        for other in devices:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot map the memory of GPU {other}"
    return None
