"""Experts on several ranks: their global numbers, and the keys of their random numbers."""

import pytest
import torch

from megatron_lowbit.megatron import experts
from megatron_lowbit.megatron.quant_recipe import QuantRecipe
from megatron_lowbit.kernels.engine import select_engine
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.training.distributed import set_step

# isort: split
from megatron.core import parallel_state
from megatron.core.quantization.quant_config import MatchContext


@pytest.fixture
def key_of(monkeypatch):
    """A layer's key in a microbatch, by its rank in the expert group and among the replicas."""

    def key(expert_rank: int, replica: int, is_expert: bool, replicas=4, microbatch=2) -> int:
        places = {
            "get_expert_model_parallel_rank": expert_rank,
            "get_expert_data_parallel_rank": replica,
            "get_expert_data_parallel_world_size": replicas,
        }
        for name, place in places.items():
            monkeypatch.setattr(parallel_state, name, lambda place=place, **_: place)
        state = torch.get_rng_state()
        set_step(3, 10, microbatch)
        found = experts.microbatch_key(is_expert)
        torch.set_rng_state(state)
        return found

    return key


def test_an_expert_draws_the_same_wherever_it_is_held(key_of):
    alone = key_of(0, 0, is_expert=True)
    assert alone == key_of(0, 0, is_expert=False)
    assert {key_of(rank, 0, is_expert=True) for rank in range(4)} == {alone}


def test_replicas_and_ranks_of_a_group_draw_apart(key_of):
    replicas = [key_of(3, replica, is_expert=True) for replica in range(4)]
    ranks = [key_of(rank, 0, is_expert=False) for rank in range(4)]
    assert len(set(replicas)) == len(set(ranks)) == 4


def test_a_microbatch_draws_the_same_on_whichever_data_parallel_rank(key_of):
    alone = [key_of(0, 0, False, replicas=1, microbatch=number) for number in range(8)]
    spread = [key_of(0, rank, False, 4, step) for step in range(2) for rank in range(4)]
    assert spread == alone


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
