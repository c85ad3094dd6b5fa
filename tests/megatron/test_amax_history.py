"""Histories of amaxes on two ranks: every rank has the histories of the whole tensor."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import megatron_lowbit.megatron  # noqa: F401  before megatron
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.features import amax_history
from megatron_lowbit.numerics import AmaxHistory
from megatron_lowbit.recipes import load_recipe

RANKS = 2
UNKNOWN = -1.0


def layer(is_expert: bool, steps: list[float]) -> SimpleNamespace:
    history = AmaxHistory(len(steps), 4, torch.device("cpu"))
    history.step = torch.tensor(steps)
    plan = SimpleNamespace(layer=SimpleNamespace(path=f"expert {is_expert}"))
    return SimpleNamespace(amax_history=history, is_expert=is_expert, plan=plan)


def test_the_largest_amax_of_all_ranks_is_recorded(run_ranks):
    run_ranks(__file__, RANKS, timeout=60)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8"])
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize(
    ("tensor", "experts", "some_skip"), [(1, 1, True), (2, 1, False), (1, 2, False)]
)
def test_a_save_without_the_other_ranks_is_refused(recipe, form, tensor, experts, some_skip):
    """Two ranks: with expert parallelism each is the first of its expert data-parallel ranks."""
    args = SimpleNamespace(
        save="runs", ckpt_format=form, world_size=2, data_parallel_size=2 // tensor,
        pipeline_model_parallel_size=1, expert_tensor_parallel_size=tensor,
        expert_model_parallel_size=experts,
    )  # fmt: skip
    run = SimpleNamespace(args=args, recipe=load_recipe(recipe))
    is_refused = (recipe, form) == ("fp8-delayed", "torch") and some_skip
    with pytest.raises(UserError, match="torch_dist") if is_refused else nullcontext():
        amax_history.AmaxHistories(run).check([])


def check(rank: int) -> None:
    """Give each rank the larger amax of another operand, and an expert tokens on one rank only."""
    dense = layer(False, [[1.0, 8.0], [5.0, 2.0]][rank])
    expert = layer(True, [[3.0, UNKNOWN], [UNKNOWN, UNKNOWN]][rank])
    before = expert.amax_history.entries.clone()
    histories = amax_history.AmaxHistories(SimpleNamespace(states=[dense, expert]))
    histories.begin_step(1, training=True)
    histories.begin_step(2, training=True)
    assert dense.amax_history.entries[:, -1].tolist() == [5.0, 8.0]
    assert expert.amax_history.entries[0, -1] == 3.0
    assert torch.equal(expert.amax_history.entries[1], before[1])


if __name__ == "__main__":
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    amax_history.replica_groups = lambda is_expert: [dist.group.WORLD]
    check(rank)
    dist.destroy_process_group()
