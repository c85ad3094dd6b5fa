"""Tensor parallelism of one linear layer's operands: shards, global numbers, collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.numerics import Draw, QuantizedTensor
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.randomness import GROUP, Key, operand_key


@dataclass(frozen=True)
class Shards:
    """Split of a linear layer over a tensor-parallel group.

    Args:
        group: the group; None for a layer that is not split.
        roles: the roles whose tensors are shards of a larger one.
        in_features, out_features: global numbers (int64) of the local features; None counts from
            zero. Each part of them starts at a multiple of 16.
        sequence_parallel: the input holds this rank's tokens only; fprop gathers it and dgrad is
            reduce-scattered.
        allreduce_dgrad: dgrad is summed over the group.
    """

    group: dist.ProcessGroup | None = None
    roles: frozenset[str] = frozenset()
    in_features: Tensor | None = None
    out_features: Tensor | None = None
    sequence_parallel: bool = False
    allreduce_dgrad: bool = False

    def max_over_group(self, amax: Tensor) -> Tensor:
        """Return the group's tensor amaxes; infinity where a rank's is not finite."""
        # Backends differ on the larger of NaN and a number.
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return amax

    def draw(self, key: Key, gemm: Gemm, role: Role, tokens: int, size: int = 1) -> Draw:
        """Return the random bits of an operand of a GEMM: its own key, and its global numbers.

        A transform of ``size`` spreads over the padding of a ragged last block: its numbers go on
        after the last feature's.
        """
        token_numbers = None
        if self.sequence_parallel and role == Role.INPUT and (rank := dist.get_rank(self.group)):
            # On the device: a capture in a CUDA graph cannot copy them there.
            device = None if self.out_features is None else self.out_features.device
            token_numbers = torch.arange(rank * tokens, (rank + 1) * tokens, device=device)
        rows, columns = {
            Role.INPUT: (token_numbers, self.in_features),
            Role.WEIGHT: (self.out_features, self.in_features),
            Role.GRAD: (token_numbers, self.out_features),
        }[role]
        if gemm == Gemm.WGRAD or (gemm == Gemm.DGRAD and role == Role.WEIGHT):
            rows, columns = columns, rows  # of the transpose
        groups = None
        if columns is not None:
            groups = columns[::GROUP] // GROUP
            padded = columns.numel() + -columns.numel() % size
            padding = torch.arange(-(-padded // GROUP) - len(groups), device=groups.device)
            groups = torch.cat([groups, groups[-1:] + 1 + padding]) if len(padding) else groups
        return Draw(operand_key(key, gemm, role), rows, groups)


UNSHARDED = Shards()


_Matrix = TypeVar("_Matrix", Tensor, QuantizedTensor)


def start_gather(
    x: _Matrix, group: dist.ProcessGroup | None, axis: int = 0
) -> Callable[[], _Matrix]:
    """Start concatenating the ranks' rows (axis 0), or their columns in whole blocks (axis 1).

    Codes travel as codes. The function that is returned waits for the result.
    """

    def join(parts: Tensor) -> Tensor:
        return parts.flatten(0, 1) if axis == 0 else parts.transpose(0, 1).flatten(1)

    if not isinstance(x, QuantizedTensor):
        wait = _start_gather([x], group)
        return lambda: join(*wait())
    ranks, (rows, columns) = dist.get_world_size(group), x.shape
    shape = (ranks * rows, columns) if axis == 0 else (rows, ranks * columns)
    names = ["codes", "scales"] + ["tensor_scale"] * x.format.scales_tensor_rows
    wait = _start_gather([getattr(x, name) for name in names], group)

    def gathered() -> QuantizedTensor:
        parts: dict[str, Any] = dict(zip(names, map(join, wait()), strict=True))
        return replace(x, shape=shape, **parts)

    return gathered


def _start_gather(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None
) -> Callable[[], list[Tensor]]:
    """Start gathering each x as (ranks, *x.shape), in rank order, all by one operation of NCCL.

    It wants one dtype: bytes.
    """
    ranks = dist.get_world_size(group)
    sent = [x.contiguous() for x in tensors]
    received = [x.new_empty((ranks * x.shape[0], *x.shape[1:])) for x in sent]
    with dist._coalescing_manager(group, async_ops=True) as work:  # Megatron-LM's DDP uses it, too
        for parts, own in zip(received, sent, strict=True):
            pair = parts.view(torch.uint8), own.view(torch.uint8)
            dist.all_gather_into_tensor(*pair, group=group)

    def wait() -> list[Tensor]:
        work.wait()
        sent.clear()  # until then its memory is read
        return [parts.unflatten(0, (ranks, -1)) for parts in received]

    return wait
