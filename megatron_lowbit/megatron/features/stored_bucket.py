"""Codes of the weights in one bucket of the distributed optimizer: quantization and gather.

A bucket's parameters lie one after another, and each rank owns an equal share of their elements.
Weights are quantized by rows of blocks, each by the rank that owns its first element. Codes lie in
the bucket's order, too: a rank's codes are contiguous, and gathered in place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_lowbit.kernels.engine import Transposed
from megatron_lowbit.layers.context import LinearContext
from megatron_lowbit.layers.operands import quantize_weight
from megatron_lowbit.layers.sharding import Shards
from megatron_lowbit.numerics import QuantizedTensor
from megatron_lowbit.numerics.gemms import Gemm, Role

_ALIGNMENT = 256
"""Bytes that the codes of each weight are aligned to, as torch allocates."""
Part = tuple[tuple[int, ...], Sequence[int]]
"""Shape of a tensor, and its rows at which the ranks' parts begin, and their number."""


def cut_rows(
    start: int, shape: tuple[int, int], block_rows: int, shard: int, ranks: int
) -> list[int]:
    """Return the first row of a weight that each rank quantizes, and the number of rows.

    ``start`` is the first element of the weight (N, K) in the bucket, of which each rank owns
    ``shard`` elements; only one rank can quantize each ``block_rows`` rows.
    """
    rows, columns = shape
    blocks = [-(-max(0, rank * shard - start) // (block_rows * columns)) for rank in range(ranks)]
    return [*(min(rows, number * block_rows) for number in blocks), rows]


class Packed:
    """Tensors one after another in one, of which each rank has a contiguous part to send.

    ``parts``: shape and cuts of each tensor.
    """

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        aligned = _ALIGNMENT // dtype.itemsize
        starts, end = [], 0
        for shape, _ in parts:
            starts.append(end)
            end += -(-torch.Size(shape).numel() // aligned) * aligned
        self.memory = torch.zeros(end, dtype=dtype, device=device)
        self.tensors = [
            self.memory[start : start + torch.Size(shape).numel()].view(shape)
            for start, (shape, _) in zip(starts, parts, strict=True)
        ]
        self._bounds = []
        for rank in range(len(parts[0][1]) - 1 if parts else 0):
            # A part begins at the first row that no earlier rank has.
            firsts = (
                start + cuts[rank] * torch.Size(shape[1:]).numel()
                for start, (shape, cuts) in zip(starts, parts, strict=True)
                if cuts[rank] < cuts[-1]
            )
            self._bounds.append(next(firsts, end))
        self._bounds.append(end)

    def parts(self) -> list[Tensor]:
        """Return each rank's part."""
        return [self.memory[begin:end] for begin, end in pairwise(self._bounds)]


def gather(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send each rank's part, of any size, to all others, which have it in the same place."""
    if group.size() == 1:
        return
    works = [
        dist.broadcast(part, group=group, group_src=rank, async_op=True)
        for rank, part in enumerate(parts)
        if part.numel()
    ]
    for work in works:
        work.wait()


@dataclass
class _Weight:
    """Weight of a bucket whose codes serve fprop and dgrad; ``cuts`` are its ranks' first rows."""

    start: int
    weight: Parameter
    context: LinearContext
    cuts: list[int]
    codes: QuantizedTensor | None = None
    format: Any = field(init=False)

    def __post_init__(self) -> None:
        self.format = self.context.precision.fprop.rhs.format
        self.shape = self.weight.shape[0], self.weight.shape[1]
        self.columns = -(-self.shape[1] // self.format.block) * self.format.block
        self.scale_cuts = [self.format.scale_shape(rows, self.columns)[0] for rows in self.cuts]

    def parts(self) -> tuple[Part, Part, Part]:
        """Return the parts of codes and block scales, in bytes, and of the tensor scale."""
        packed = 2 if self.format.element.bits == 4 else 1
        width = self.format.scale_shape(self.cuts[-1], self.columns)[1]
        width *= self.format.scale_dtype.itemsize
        return (
            ((self.shape[0], self.columns // packed), self.cuts),
            ((self.scale_cuts[-1], width), self.scale_cuts),
            ((1,), [int(rows > 0) for rows in self.cuts]),  # the rank with the first row has it
        )

    def store(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> None:
        """Make memory in the shapes of the parts the layer's quantized weight."""
        scales = scales.flatten().view(self.format.scale_dtype)
        self.codes = QuantizedTensor(
            codes.view(self.format.element.dtype or torch.uint8),
            scales.view(self.format.scale_shape(self.shape[0], self.columns)),
            tensor_scale[0],
            self.format,
            self.shape,
        )
        serves = self.context.precision.weight_serves_dgrad
        of_dgrad = Transposed(self.codes) if serves else self.codes
        self.context.weight_cache.operands = self.codes, of_dgrad

    def request(self, rows: int) -> Any:
        """Return the request by which so many rows are quantized."""
        return self.context.request(Gemm.FPROP, Role.WEIGHT, rows, needs_codes=True)

    def rows_of(self, data: Tensor, rank: int) -> Tensor:
        """Return a rank's rows of the weight in the bucket's memory."""
        first, last = self.cuts[rank : rank + 2]
        rows, columns = last - first, self.shape[1]
        begin = self.start + first * columns
        return data[begin : begin + rows * columns].view(rows, columns)

    def write(self, codes: QuantizedTensor, rank: int) -> None:
        """Write the codes of a rank's rows."""
        assert self.codes is not None
        first, last = self.cuts[rank : rank + 2]
        self.codes.codes.view(torch.uint8)[first:last] = codes.codes.view(torch.uint8)
        self.codes.scales[self.scale_cuts[rank] : self.scale_cuts[rank + 1]] = codes.scales
        if first == 0:
            self.codes.tensor_scale.copy_(codes.tensor_scale)


class StoredBucket:
    """Codes of a bucket's weights; its other parameters move to a tensor of their own.

    The bucket's own memory can be freed between :meth:`sync` and the next optimizer step.
    ``gathers_codes`` is False where a weight has different codes for fprop and dgrad. Such a bucket
    is gathered in its own precision, which takes no more bytes, and each rank quantizes all of it.

    Args:
        bucket: Megatron-LM's bucket, with ``param_data`` and ``param_to_index``.
        group: ranks that share it.
        contexts: a context for each weight to be stored, with the layer's cache.

    Attributes:
        replaced_bytes: bytes of the stored weights in the bucket's precision.
        whole_bytes: bytes of other ranks' shares in the bucket's precision.
    """

    def __init__(
        self, bucket: Any, group: dist.ProcessGroup, contexts: Mapping[Parameter, LinearContext]
    ) -> None:
        self.data: Tensor = bucket.param_data
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.shard = len(self.data) // self.ranks
        self.replaced_bytes = sum(weight.nbytes for weight in contexts)
        self.whole_bytes = self.data.nbytes - self.shard * self.data.itemsize
        self._places = sorted(bucket.param_to_index.items(), key=lambda item: item[1])
        self._others = [(s, e, p) for p, (s, e) in self._places if p not in contexts]
        self.gathers_codes = all(c.precision.weight_in_one_set for c in contexts.values())
        self._weights: list[_Weight] = []
        self._two_code_sets: list[tuple[Parameter, LinearContext]] = []
        for parameter, (start, _) in self._places:
            context = contexts.get(parameter)
            if context is None:
                continue
            context.weight_cache.stored = True
            if context.precision.weight_in_one_set:
                cuts = self._cut(start, parameter.shape, context.precision.fprop.rhs.format)
                self._weights.append(_Weight(start, parameter, context, cuts))
            else:
                self._two_code_sets.append((parameter, context))
        self._kept: dict[Parameter, Tensor] = {}
        self._allocate()

    def _cut(self, start: int, shape: Sequence[int], format: Any) -> list[int]:
        if not self.gathers_codes:
            return [0] * (self.rank + 1) + [shape[0]] * (self.ranks - self.rank)
        return cut_rows(start, (shape[0], shape[1]), format.block_rows, self.shard, self.ranks)

    def _allocate(self) -> None:
        """Allocate codes and the other parameters' own memory, and make them the layers'."""
        device = self.data.device
        parts = [weight.parts() for weight in self._weights]
        self._codes = [
            Packed([of_weight[i] for of_weight in parts], dtype, device)
            for i, dtype in enumerate((torch.uint8, torch.uint8, torch.float32))
        ]
        tensors = (packed.tensors for packed in self._codes)
        for weight, *memory in zip(self._weights, *tensors, strict=True):
            weight.store(*memory)
        others = [
            ((end - start,), cut_rows(start, (end - start, 1), 1, self.shard, self.ranks))
            for start, end, _ in self._others
        ]
        self._unquantized = Packed(others, self.data.dtype, device)
        self._copy_unquantized()
        for (_, _, parameter), tensor in zip(self._others, self._unquantized.tensors, strict=True):
            parameter.data = tensor.view(parameter.shape)

    def _copy_unquantized(self) -> None:
        for (start, end, _), tensor in zip(self._others, self._unquantized.tensors, strict=True):
            tensor.copy_(self.data[start:end])

    @property
    def code_bytes(self) -> int:
        """Bytes of the stored codes and scales."""
        twice = (side for _, c in self._two_code_sets for side in c.weight_cache.operands or ())
        return sum(p.memory.nbytes for p in self._codes) + sum(side.nbytes for side in twice)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that this rank receives in a step."""
        if not self.gathers_codes:
            return self.whole_bytes
        packs = [p for p in (*self._codes, self._unquantized) if p.tensors]
        parts = [p.parts() for p in packs] + [[self.data[s] for s in self._boundary_slices()]]
        return sum(
            part.nbytes for of_ranks in parts for r, part in enumerate(of_ranks) if r != self.rank
        )

    def write_own_shard(self) -> None:
        """Write this rank's elements from the optimizer's FP32 parameters.

        Where Megatron-LM has none, since the precision-aware optimizer keeps them as what the BF16
        parameters lack, from a copy of those.
        """
        for parameter, first, last in self._own_elements():
            kept = self._kept.get(parameter)
            self.data[first:last] = parameter.main_param.view(-1) if kept is None else kept

    def _keep_own_shard(self) -> None:
        """Copy the elements that :meth:`write_own_shard` could not write otherwise."""
        for parameter, first, last in self._own_elements():
            if parameter.main_param is None:
                if parameter not in self._kept:
                    self._kept[parameter] = torch.empty_like(self.data[first:last])
                self._kept[parameter].copy_(self.data[first:last])

    def _own_elements(self) -> Iterator[tuple[Any, int, int]]:
        """Yield parameters of which this rank has a share, and its limits in the bucket."""
        begin, end = self.rank * self.shard, (self.rank + 1) * self.shard
        for parameter, (start, stop) in self._places:
            first, last = max(begin, start), min(end, stop)
            if first < last:
                yield parameter, first, last

    def sync(self) -> None:
        """Quantize the new weights, and gather them and the other parameters from their ranks.

        This rank's share of the bucket is to be in its memory, and without ``gathers_codes`` the
        whole bucket.
        """
        self._keep_own_shard()
        self._copy_unquantized()
        if self.gathers_codes:
            gather([self.data[head] for head in self._boundary_slices()], self.group)
        self._quantize()
        if self.gathers_codes:
            for packed in (*self._codes, self._unquantized):
                gather(packed.parts(), self.group)

    def _boundary_slices(self) -> list[slice]:
        """Return the elements of each rank's share that belong to an earlier rank's last block.

        They are at its beginning, and sent in the bucket's own precision.
        """
        heads = []
        for rank in range(self.ranks):
            begin = end = rank * self.shard
            for weight in self._weights:
                rest = weight.start + weight.cuts[rank] * weight.shape[1]
                if weight.start < begin < rest:
                    end = min(begin + self.shard, rest)
            heads.append(slice(begin, end))
        return heads

    def _quantize(self) -> None:
        for parameter, context in self._two_code_sets:
            context.weight_cache.operands = None
            quantize_weight(context, parameter.detach)
        rows = [weight.rows_of(self.data, self.rank) for weight in self._weights]
        amaxes = self._amaxes(rows)
        for weight, x, amax in zip(self._weights, rows, amaxes, strict=True):
            if len(x):
                request = weight.request(len(x))
                codes, _ = weight.context.engine.quantize(x, request, None, (amax, None))
                weight.write(codes, self.rank)

    def _amaxes(self, rows: list[Tensor]) -> list[Tensor | None]:
        """Return the amaxes of the whole weights that tensor scales are made from, else None."""
        amaxes: list[Tensor | None] = [None] * len(rows)
        scaled = [n for n, weight in enumerate(self._weights) if weight.format.tensor_scaled]
        if not scaled:
            return amaxes
        rank_amaxes = torch.zeros(len(scaled), device=self.data.device)
        for number, n in enumerate(scaled):
            if len(rows[n]):
                weight = self._weights[n]
                request = weight.request(len(rows[n]))
                rank_amaxes[number] = weight.context.engine.amaxes(rows[n], request, None)[0]
        if self.gathers_codes and self.ranks > 1:
            rank_amaxes = Shards(self.group).max_over_group(rank_amaxes)
        for number, n in enumerate(scaled):
            # The recipe may also want the maximum over tensor-parallel ranks.
            amaxes[n] = self._weights[n].context.scale_amax(
                Gemm.FPROP, Role.WEIGHT, rank_amaxes[number]
            )
        return amaxes
