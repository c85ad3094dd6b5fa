"""Experts on several ranks: global numbers, replicas, and random keys."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.megatron.layers import state as experts
from megatron_lowbit.megatron.layers.state import layer_of
from megatron_lowbit.megatron.run.steps import microbatch_key, set_microbatch_key

# isort: split
from megatron.core import parallel_state


@pytest.fixture
def place(monkeypatch):
    """Function that sets this process's position in Megatron-LM's layout."""

    def put(**answers: object) -> None:
        for name, answer in answers.items():
            monkeypatch.setattr(parallel_state, name, lambda answer=answer, **_: answer)

    return put


@pytest.fixture
def key_of(place):
    """Function of the ranks in the expert group and among replicas: a layer's random key."""

    def key(expert_rank: int, replica: int, is_expert: bool, replicas=4, microbatch=2) -> int:
        place(
            get_expert_model_parallel_rank=expert_rank,
            get_expert_data_parallel_rank=replica,
            get_expert_data_parallel_world_size=replicas,
            get_context_parallel_rank=0,
        )
        set_microbatch_key(3, 10, microbatch)
        return microbatch_key(is_expert)

    before = torch.get_rng_state()
    yield key
    torch.set_rng_state(before)


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


def test_a_key_leaves_the_generators_draws_alone(key_of):
    state = torch.get_rng_state()
    expected = torch.rand(3)
    torch.set_rng_state(state)
    key_of(1, 2, is_expert=False)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 4), (3, 12)])
def test_the_first_local_expert(place, rank, first):
    place(get_expert_model_parallel_rank=rank, get_expert_model_parallel_world_size=4)
    assert experts.first_local_expert(SimpleNamespace(num_moe_experts=16)) == first
    assert experts.first_local_expert(SimpleNamespace(num_moe_experts=None)) == 0


def test_places_among_replicas(place):
    place(
        get_tensor_model_parallel_rank=1,
        get_data_parallel_rank=2,
        get_expert_tensor_parallel_rank=3,
        get_expert_data_parallel_rank=4,
        get_tensor_and_data_parallel_group="all",
        get_expert_tensor_parallel_group="tensor",
        get_expert_data_parallel_group="data",
    )
    assert experts.replica_id(is_expert=False) == (1, 2)
    assert experts.replica_id(is_expert=True) == (3, 4)
    assert experts.replica_groups(is_expert=False) == ["all"]
    assert experts.replica_groups(is_expert=True) == ["tensor", "data"]


class Block(torch.nn.Module):
    """Block of Megatron-LM with its global number, from 1."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number


@pytest.fixture
def chunk() -> torch.nn.Module:
    """Blocks 5 and 6 of 8, and one of multi-token prediction."""
    chunk = torch.nn.Module()
    chunk.config = SimpleNamespace(num_layers=8)
    for name, numbers in (("decoder", (6, 7)), ("mtp", (1,))):
        part = torch.nn.Module()
        part.layers = torch.nn.ModuleList(map(Block, numbers))
        chunk.add_module(name, part)
    return chunk


@pytest.mark.parametrize(("local", "seen"), [(0, 4), (1, 5), (10, 14)])
def test_rules_see_global_numbers(chunk, local, seen):
    path = f"decoder.layers.1.mlp.experts.local_experts.{local}.linear_fc1"
    layer = layer_of(chunk, path, first_expert=4)
    assert layer.path == f"decoder.layers.6.mlp.experts.local_experts.{seen}.linear_fc1"
    assert (layer.block, layer.num_blocks) == (6, 8)


def test_blocks_of_multi_token_prediction_come_last(chunk):
    layer = layer_of(chunk, "mtp.layers.0.transformer_layer.mlp.linear_fc1", first_expert=0)
    assert layer.path == "mtp.layers.0.transformer_layer.mlp.linear_fc1"
    assert (layer.block, layer.num_blocks) == (8, 8)


def test_what_is_in_no_block_is_no_rules_business(chunk):
    assert layer_of(chunk, "output_layer", first_expert=0) is None
