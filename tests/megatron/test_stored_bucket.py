"""Codes of a bucket that three ranks share, against each weight quantized whole.

This file is its own worker: ``test_stored_bucket.py RANK``.
"""

import os
import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

import megatron_lowbit.megatron  # noqa: F401  before megatron
from megatron_lowbit import load_recipe
from megatron_lowbit.kernels.engine import ReferenceEngine, Transposed
from megatron_lowbit.layers import LinearContext, WeightCache
from megatron_lowbit.megatron.features.stored_bucket import Packed, StoredBucket, cut_rows
from megatron_lowbit.numerics import FORMATS, quantize

RANKS = 3
# The recipe's own configuration, and the format of its weights with its options.
ONE_SET = {
    "fp8-tile": ("fp8", "fp8-128x128-e4m3", {"scale_format": "pow2"}),
    "fp8-tensorwise": ("fp8", "fp8-tensor-e4m3", {}),
    "nvfp4": ("nvfp4", "nvfp4-2d", {}),
    "qat-int4-g32": ("int4", "int4-1x32", {}),
}
# Formats with other codes for dgrad: blocks run along K in one, along N in the other.
TWO_SETS = {
    "mxfp8": ("mxfp8", "mxfp8-e4m3", {"scale_rounding": "rceil"}),
    "fp8-row": ("fp8", "fp8-row-e4m3", {}),
}
# Weights are cut within blocks by the ranks' limits, at 6912 and 13824 elements.
SHAPES = {"a": (96, 64), "norm": (64,), "b": (200, 64), "c": (16, 32), "bias": (33,)}
LENGTH = 20736
NOT_FINITE = 2
"""Step after which a weight has a NaN, on one rank."""


def placed() -> dict[str, tuple[int, int]]:
    """Return the places of the parameters in a bucket, each at a multiple of 64."""
    places, end = {}, 0
    for name, shape in SHAPES.items():
        start = -(-end // 64) * 64
        end = start + torch.Size(shape).numel()
        places[name] = start, end
    assert end < LENGTH and LENGTH % RANKS == 0
    return places


def parameters(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    values = {
        # Magnitudes grow along the rows: tensors' amaxes are on the last rank with a part.
        name: (torch.randn(shape, generator=generator) * torch.arange(1, shape[0] + 1).view(
            -1, *[1] * (len(shape) - 1)
        )).bfloat16()
        for name, shape in SHAPES.items()
    }  # fmt: skip
    if step == NOT_FINITE:
        values["b"][150, 0] = torch.nan
    return values


class Model:
    """Parameters in a bucket, as Megatron-LM holds them, with the main parameters of a rank."""

    def __init__(self, recipe: str, config: str) -> None:
        self.bucket = Namespace(param_data=torch.zeros(LENGTH, dtype=torch.bfloat16))
        self.places = placed()
        self.parameters = {
            name: Parameter(self.bucket.param_data[start:end].view(SHAPES[name]))
            for name, (start, end) in self.places.items()
        }
        self.bucket.param_to_index = {p: self.places[name] for name, p in self.parameters.items()}
        precision = load_recipe(recipe).configs[config]
        context = LinearContext(precision, ReferenceEngine("a test"), key=0)
        self.contexts = {
            name: replace(context, weight_cache=WeightCache())
            for name, shape in SHAPES.items()
            if len(shape) == 2
        }

    def store(self) -> StoredBucket:
        contexts = {self.parameters[name]: context for name, context in self.contexts.items()}
        return StoredBucket(self.bucket, dist.group.WORLD, contexts)

    def update(self, stored: StoredBucket, step: int, whole: bool, has_main: bool) -> None:
        """Free the bucket's memory and let each rank's optimizer write its share.

        An optimizer that has no FP32 parameters to show writes the bucket itself.
        """
        storage = self.bucket.param_data.untyped_storage()
        storage.resize_(0)
        storage.resize_(2 * LENGTH)
        self.bucket.param_data.fill_(torch.nan)
        shard = LENGTH // RANKS
        begin = 0 if whole else dist.get_rank() * shard
        stop = LENGTH if whole else begin + shard
        for name, value in parameters(step).items():
            start, end = self.places[name]
            first, last = max(begin, start), min(stop, end)
            if first < last:
                main = value.view(-1)[first - start : last - start].float()
                self.parameters[name].main_param = main if has_main else None
                if whole or not has_main:
                    self.bucket.param_data[first:last] = main
        if not whole and has_main:
            stored.write_own_shard()


def counting_broadcasts(sizes: list[int]):
    broadcast = dist.broadcast

    def count(tensor, *args, group_src, **kwargs):
        if group_src != dist.get_rank():
            sizes.append(tensor.nbytes)
        return broadcast(tensor, *args, group_src=group_src, **kwargs)

    return count


def check_codes(
    recipe: str, config: str, format: str, options: dict, one_set: bool, has_main: bool = True
) -> None:
    model = Model(recipe, config)
    # In other formats a NaN fills its block's padding, of which a transpose has another one.
    steps = 3 if has_main and FORMATS[format].tensor_scaled else 2
    with torch.no_grad():
        stored = model.store()
        assert stored.gathers_codes == one_set
        for step in range(steps):
            model.update(stored, step, not one_set, has_main)
            sizes: list[int] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "broadcast", counting_broadcasts(sizes))
                stored.sync()
            assert not one_set or sum(sizes) == stored.gathered_bytes
            model.bucket.param_data.untyped_storage().resize_(0)
            expected = parameters(step)
            if not has_main:
                check_own_shard(model, stored, expected)
            for name in ("norm", "bias"):
                assert torch.equal(model.parameters[name], expected[name]), name
            for name, context in model.contexts.items():
                check_weight(context, expected[name], format, options, one_set)
    sides = [side for c in model.contexts.values() for side in c.weight_cache.operands]
    counted = {id(x): x for x in (getattr(side, "of", side) for side in sides)}
    smallest = sum(codes.nbytes for codes in counted.values())
    assert smallest <= stored.code_bytes < smallest + 3 * 3 * 256  # aligned


def check_own_shard(model: Model, stored: StoredBucket, expected: dict) -> None:
    """Check what an optimizer finds that has only what the BF16 parameters lack."""
    data = model.bucket.param_data
    data.untyped_storage().resize_(2 * LENGTH)
    data.fill_(torch.nan)
    stored.write_own_shard()
    begin = dist.get_rank() * (LENGTH // RANKS)
    for name, (start, end) in model.places.items():
        first, last = max(begin, start), min(begin + LENGTH // RANKS, end)
        if first < last:
            assert torch.equal(
                data[first:last], expected[name].view(-1)[first - start : last - start]
            )
    data.untyped_storage().resize_(0)


def check_weight(context, weight, format: str, options: dict, one_set: bool) -> None:
    by_row, by_col = context.weight_cache.operands
    same(by_row, quantize(weight, format, **options))
    if isinstance(by_col, Transposed):
        same(context.engine.transposed(by_col.of), quantize(weight.t(), format, **options))
    elif one_set:
        assert by_col is by_row
    else:
        same(by_col, quantize(weight.t(), format, **options))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers, the sign of zero included, with the same bits for every NaN."""
    x = x.float()
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def same(found, expected) -> None:
    assert found.format == expected.format and found.shape == expected.shape
    for name in ("codes", "scales", "tensor_scale"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype and one.shape == other.shape, name
        if one.is_floating_point():
            one, other = bits(one), bits(other)
        assert torch.equal(one, other), name


def test_codes_of_three_ranks_are_those_of_whole_weights(run_ranks):
    run_ranks(__file__, RANKS, timeout=120)


def test_a_block_belongs_to_the_rank_with_its_first_element():
    # Elements 100 to 899: blocks of 4 rows begin at 100, 140, 180 ...
    assert cut_rows(100, (80, 10), 4, shard=250, ranks=4) == [0, 16, 40, 68, 80]
    assert cut_rows(0, (5, 10), 128, shard=10, ranks=5) == [0, 5, 5, 5, 5, 5]


def test_parts_are_contiguous_and_complete():
    packed = Packed([((3, 2), [0, 3, 3]), ((4, 5), [0, 1, 4])], torch.uint8, torch.device("cpu"))
    first, last = packed.parts()
    assert len(first) == 256 + 5 and len(first) + len(last) == len(packed.memory)
    packed.tensors[1][1:] = 1
    assert last[:15].all() and not first.any()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(sys.argv[1]), world_size=int(os.environ["WORLD_SIZE"]))
    for recipe, case in ONE_SET.items():
        check_codes(recipe, *case, one_set=True)
    check_codes("nvfp4", *ONE_SET["nvfp4"], one_set=True, has_main=False)
    for recipe, case in TWO_SETS.items():
        check_codes(recipe, *case, one_set=False)
    dist.destroy_process_group()
