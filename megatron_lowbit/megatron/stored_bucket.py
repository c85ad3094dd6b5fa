"""Codes of the weights in one bucket of the distributed optimizer: quantization and gather.

A bucket's parameters lie one behind the other, and each rank owns an equal share of their elements.
Weights are quantized by rows of blocks, each by the rank that owns its first element. Codes lie in
the bucket's order, too, so that those of a rank are contiguous, and are gathered in place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_lowbit.layers.context import LazyTranspose, LinearContext
from megatron_lowbit.layers.operands import quantize_weight
from megatron_lowbit.numerics import QuantizedTensor
from megatron_lowbit.numerics.gemms import Gemm, Role

_ALIGNMENT = 256
"""Bytes that the codes of each weight are aligned to, as torch allocates."""


def cut_rows(
    start: int, shape: tuple[int, int], block_rows: int, shard: int, ranks: int
) -> list[int]:
    """Return the first row of a weight that each rank quantizes, and the number of rows.

    Args:
        start: the weight's first element in the bucket.
        shape: (N, K) of the weight.
        block_rows: rows that only one rank can quantize.
        shard: elements that each rank owns.
        ranks: number of ranks.
    """
    rows, columns = shape
    blocks = [-(-max(0, rank * shard - start) // (block_rows * columns)) for rank in range(ranks)]
    return [*(min(rows, number * block_rows) for number in blocks), rows]


class Packed:
    """Tensors one behind the other in one, of which each rank has a contiguous part to send.

    Args:
        parts: shape of each tensor, and its rows at which the ranks' parts begin, and their number.
        dtype: of all tensors.
        device: where they are.
    """

    def __init__(
        self,
        parts: Sequence[tuple[tuple[int, ...], Sequence[int]]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        aligned = _ALIGNMENT // dtype.itemsize
        starts, end = [], 0
        for shape, _ in parts:
            starts.append(end)
            size = torch.Size(shape).numel()
            end += -(-size // aligned) * aligned
        self.whole = torch.zeros(end, dtype=dtype, device=device)
        self.tensors = [
            self.whole[start : start + torch.Size(shape).numel()].view(shape)
            for start, (shape, _) in zip(starts, parts, strict=True)
        ]
        ranks = len(parts[0][1]) - 1 if parts else 0
        self._bounds = [self._begin(starts, parts, rank) for rank in range(ranks)] + [end]

    def _begin(self, starts: list[int], parts: Sequence[Any], rank: int) -> int:
        """Return where a rank's part begins: at the first row that no earlier rank has."""
        for start, (shape, cuts) in zip(starts, parts, strict=True):
            if cuts[rank] < cuts[-1]:
                return start + cuts[rank] * torch.Size(shape[1:]).numel()
        return len(self.whole)

    def parts(self) -> list[Tensor]:
        """Return each rank's part."""
        return [self.whole[begin:end] for begin, end in pairwise(self._bounds)]


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

    @property
    def format(self) -> Any:
        return self.context.precision.fprop.rhs.format

    @property
    def columns(self) -> int:
        """Columns in whole blocks."""
        return -(-self.weight.shape[1] // self.format.block) * self.format.block

    def code_part(self) -> tuple[tuple[int, ...], list[int]]:
        """Return shape and cuts of the codes, in bytes."""
        packed = 2 if self.format.element.bits == 4 else 1
        return (self.weight.shape[0], self.columns // packed), self.cuts

    def scale_part(self) -> tuple[tuple[int, ...], list[int]]:
        """Return shape and cuts of the block scales, in bytes."""
        rows = [self.format.scale_shape(rows, self.columns)[0] for rows in self.cuts]
        width = self.format.scale_shape(self.cuts[-1], self.columns)[1]
        return (rows[-1], width * self.format.scale_dtype.itemsize), rows

    def tensor_scale_part(self) -> tuple[tuple[int, ...], list[int]]:
        """Return shape and cuts of the tensor scale, which the rank with the first row has."""
        return (1,), [int(rows > 0) for rows in self.cuts]

    def store(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> None:
        """Make memory in the shapes of the parts the layer's quantized weight."""
        format, shape = self.format, (self.weight.shape[0], self.weight.shape[1])
        scales = scales.flatten().view(format.scale_dtype)
        self.codes = QuantizedTensor(
            codes.view(format.element.dtype or torch.uint8),
            scales.view(format.scale_shape(shape[0], self.columns)),
            tensor_scale[0],
            format,
            shape,
        )
        serves = self.context.precision.weight_serves_dgrad
        of_dgrad = LazyTranspose(self.codes) if serves else self.codes
        self.context.weight_cache.operands = self.codes, of_dgrad

    def write(self, codes: QuantizedTensor, rank: int) -> None:
        """Write the codes of a rank's rows."""
        assert self.codes is not None
        first, last = self.cuts[rank : rank + 2]
        self.codes.codes.view(torch.uint8)[first:last] = codes.codes.view(torch.uint8)
        rows = self.scale_part()[1]
        self.codes.scales[rows[rank] : rows[rank + 1]] = codes.scales
        if first == 0:
            self.codes.tensor_scale.copy_(codes.tensor_scale)


class StoredBucket:
    """Codes of a bucket's weights; its other parameters move to a tensor of their own.

    The bucket's own memory can be freed between :meth:`sync` and the next optimizer step.

    Args:
        bucket: Megatron-LM's bucket, with ``param_data`` and ``param_to_index``.
        group: ranks that share it.
        contexts: a context for each weight to be stored, with the layer's cache.

    Attributes:
        gathers_codes: False where a weight has different codes for fprop and dgrad. Such a bucket
            is gathered in its own precision, which takes no more bytes.
    """

    def __init__(
        self, bucket: Any, group: dist.ProcessGroup, contexts: Mapping[Parameter, LinearContext]
    ) -> None:
        self.data: Tensor = bucket.param_data
        self.group, self.rank, ranks = group, group.rank(), group.size()
        self.shard = len(self.data) // ranks
        self._places = sorted(bucket.param_to_index.items(), key=lambda item: item[1])
        stored = [(place[0], p, contexts[p]) for p, place in self._places if p in contexts]
        one_set = [c.precision.weight_in_one_set for _, _, c in stored]
        self.gathers_codes = all(one_set)
        self._two_code_sets = [
            (p, c) for (_, p, c), one in zip(stored, one_set, strict=True) if not one
        ]
        self._weights = [
            _Weight(start, p, c, self._cut(start, p.shape, c.precision.fprop.rhs.format.block_rows))
            for (start, p, c), one in zip(stored, one_set, strict=True)
            if one
        ]
        self._kept: dict[Parameter, Tensor] = {}
        self._others = [(s, e, p) for p, (s, e) in self._places if p not in contexts]
        self._allocate()
        for context in contexts.values():
            context.weight_cache.stored = True

    def _cut(self, start: int, shape: Sequence[int], block_rows: int) -> list[int]:
        if not self.gathers_codes:  # each rank quantizes all
            return [0] * (self.rank + 1) + [shape[0]] * (self.group.size() - self.rank)
        return cut_rows(start, (shape[0], shape[1]), block_rows, self.shard, self.group.size())

    def _allocate(self) -> None:
        """Allocate codes and the other parameters' own memory, and make them the layers'."""
        device, weights = self.data.device, self._weights
        self._codes = Packed([w.code_part() for w in weights], torch.uint8, device)
        self._scales = Packed([w.scale_part() for w in weights], torch.uint8, device)
        self._tensor_scales = Packed(
            [w.tensor_scale_part() for w in weights], torch.float32, device
        )
        parts = (self._codes.tensors, self._scales.tensors, self._tensor_scales.tensors)
        for weight, codes, scales, tensor_scale in zip(weights, *parts, strict=True):
            weight.store(codes, scales, tensor_scale)
        sizes = [((e - s,), self._cut_elements(s, e)) for s, e, _ in self._others]
        self._unquantized = Packed(sizes, self.data.dtype, device)
        for (start, end, parameter), own in zip(
            self._others, self._unquantized.tensors, strict=True
        ):
            own.copy_(self.data[start:end])
            parameter.data = own.view(parameter.shape)

    def _cut_elements(self, start: int, end: int) -> list[int]:
        return cut_rows(start, (end - start, 1), 1, self.shard, self.group.size())

    @property
    def code_bytes(self) -> int:
        """Bytes of the stored codes and scales."""
        twice = (side for _, c in self._two_code_sets for side in c.weight_cache.operands or ())
        packed = (self._codes, self._scales, self._tensor_scales)
        return sum(p.whole.nbytes for p in packed) + sum(side.nbytes for side in twice)

    @property
    def replaced_bytes(self) -> int:
        """Bytes of the stored weights in the bucket's precision."""
        others = sum(end - start for start, end, _ in self._others)
        return (sum(end - start for _, (start, end) in self._places) - others) * self.data.itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of other ranks' shares in the bucket's precision."""
        return self.data.nbytes - self.shard * self.data.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes that this rank receives in a step."""
        if not self.gathers_codes:
            return self.whole_bytes
        packed = (self._codes, self._scales, self._tensor_scales, self._unquantized)
        sizes = [[part.nbytes for part in p.parts()] for p in packed if p.tensors]
        sizes.append([(h.stop - h.start) * self.data.itemsize for h in self._boundary_slices()])
        return sum(sum(of_ranks) - of_ranks[self.rank] for of_ranks in sizes)

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
        for parameter, place in self._places:
            first, last = max(begin, place[0]), min(end, place[1])
            if first < last:
                yield parameter, first, last

    def sync(self) -> None:
        """Quantize the new weights, and gather them and the other parameters from their ranks.

        This rank's share of the bucket is to be in its memory, and without ``gathers_codes`` the
        whole bucket.
        """
        self._keep_own_shard()
        for (start, _, _), own in zip(self._others, self._unquantized.tensors, strict=True):
            own.copy_(self.data[start : start + len(own)])
        if self.gathers_codes:
            gather([self.data[head] for head in self._boundary_slices()], self.group)
        self._quantize()
        if self.gathers_codes:
            for packed in (self._codes, self._scales, self._tensor_scales, self._unquantized):
                gather(packed.parts(), self.group)

    def _boundary_slices(self) -> list[slice]:
        """Return the elements of each rank's share that belong to an earlier rank's last block.

        They are at its beginning, and sent in the bucket's own precision.
        """
        heads = []
        for rank in range(self.group.size()):
            begin = end = rank * self.shard
            for weight in self._weights:
                rest = weight.start + weight.cuts[rank] * weight.weight.shape[1]
                if weight.start < begin < rest:
                    end = min(begin + self.shard, rest)
            heads.append(slice(begin, end))
        return heads

    def _quantize(self) -> None:
        for parameter, context in self._two_code_sets:
            context.weight_cache.operands = None
            quantize_weight(context, parameter.detach)
        rows = [self._own_rows(weight) for weight in self._weights]
        amaxes = self._amaxes(rows)
        for weight, x, amax in zip(self._weights, rows, amaxes, strict=True):
            if not len(x):
                continue
            request = _request(weight, len(x))
            codes, _ = weight.context.engine.quantize(x, request, None, (amax, None))
            weight.write(codes, self.rank)

    def _own_rows(self, weight: _Weight) -> Tensor:
        first, last = weight.cuts[self.rank], weight.cuts[self.rank + 1]
        columns = weight.weight.shape[1]
        begin = weight.start + first * columns
        return self.data[begin : begin + (last - first) * columns].view(last - first, columns)

    def _amaxes(self, rows: list[Tensor]) -> list[Tensor | None]:
        """Return the amaxes of the whole weights that tensor scales are made from, else None."""
        scaled = [n for n, w in enumerate(self._weights) if w.format.tensor_scaled]
        amaxes: list[Tensor | None] = [None] * len(rows)
        if not scaled:
            return amaxes
        own = torch.zeros(len(scaled), device=self.data.device)
        for number, n in enumerate(scaled):
            weight, x = self._weights[n], rows[n]
            if len(x):
                request = _request(weight, len(x))
                own[number] = weight.context.engine.amaxes(x, request, None)[0]
        if self.gathers_codes and self.group.size() > 1:
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.group)
        for number, n in enumerate(scaled):
            # The recipe may also want the maximum over tensor-parallel ranks.
            amaxes[n] = self._weights[n].context.scale_amax(Gemm.FPROP, Role.WEIGHT, own[number])
        return amaxes


def _request(weight: _Weight, rows: int) -> Any:
    return weight.context.request(Gemm.FPROP, Role.WEIGHT, rows, needs_codes=True)
