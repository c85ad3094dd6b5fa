"""Experts on several ranks: their global numbers, and the keys of their random numbers."""

import pytest
import torch

from megatron_lowbit.integrations.megatron_core import experts
from megatron_lowbit.integrations.megatron_core.quant_recipe import QuantRecipe
from megatron_lowbit.kernels.engine import select_engine
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.training.distributed import set_step

# isort: split
from megatron.core import parallel_state
from megatron.core.quantization.quant_config import MatchContext


@pytest.fixture
def key_of(monkeypatch):
    """The microbatch key of a layer on a rank of given data- and expert-data-parallel ranks."""

    def key(data_rank: int, expert_data_rank: int, is_expert: bool) -> int:
        ranks = {
            "get_data_parallel_rank": data_rank,
            "get_expert_data_parallel_rank": expert_data_rank,
        }
        for name, rank in ranks.items():
            monkeypatch.setattr(parallel_state, name, lambda rank=rank, **_: rank)
        state = torch.get_rng_state()
        set_step(3, 10, 2)
        found = experts.microbatch_key(is_expert)
        torch.set_rng_state(state)
        return found

    return key


def test_an_expert_draws_the_same_wherever_it_is_held(key_of):
    alone = key_of(0, 0, is_expert=True)
    assert alone == key_of(0, 0, is_expert=False)
    assert {key_of(rank, 0, is_expert=True) for rank in range(4)} == {alone}


def test_replicas_and_data_ranks_draw_apart(key_of):
    replicas = [key_of(3, replica, is_expert=True) for replica in range(4)]
    ranks = [key_of(rank, 0, is_expert=False) for rank in range(4)]
    assert len(set(replicas)) == len(set(ranks)) == 4


@pytest.mark.parametrize(("local", "seen"), [(0, 4), (1, 5), (10, 14)])
def test_rules_see_global_numbers(local, seen):
    recipe = QuantRecipe(
        load_recipe("mxfp4-backward"), 8, 6, select_engine(torch.device("cpu"), "reference"),
        accumulate_main_grad=False, first_expert=4,
    )  # fmt: skip
    path = f"decoder.layers.1.mlp.experts.local_experts.{local}.linear_fc1"
    plan = recipe.match(MatchContext(path, 1)).config["plan"]
    assert plan.layer.path == f"decoder.layers.7.mlp.experts.local_experts.{seen}.linear_fc1"
    assert plan.layer.block == 7
