"""Random keys of microbatches on the ranks of Megatron-LM's layouts."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lowbit.megatron.run.steps import microbatch_key, set_microbatch_key

# isort: split
from megatron.core import parallel_state

LAYOUTS = [
    {},
    {"tensor_model_parallel_size": 2},
    {"context_parallel_size": 2},
    {"expert_model_parallel_size": 4},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2},
    {"expert_tensor_parallel_size": 2},
    {"context_parallel_size": 2, "expert_tensor_parallel_size": 4},
    {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    },
]
Places = tuple[dict[int, int], dict[int, int]]


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    """Restore the generator, which carries the key."""
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


def on_each_rank(layout: dict[str, int], function: Callable[[], object], ranks: int = 8) -> list:
    """Call a function on each rank of a layout, one after another, in a fake process group."""
    answers = []
    for rank in range(ranks):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **layout)
            answers.append(function())
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    return answers


def keys() -> tuple[int, int]:
    set_microbatch_key(3, 10, 2)
    return microbatch_key(False), microbatch_key(True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_that_multiply_the_same_tokens_draw_the_same(layout):
    """Others draw apart: both the ranks of other sequences and of other tokens of a sequence."""

    def place() -> tuple[object, object]:
        dense = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return (dense, parallel_state.get_expert_data_parallel_rank()), keys()

    found = on_each_rank(layout, place)
    for part in (0, 1):
        by_place: dict[object, set[int]] = {}
        for places, drawn in found:
            by_place.setdefault(places[part], set()).add(drawn[part])
        assert all(len(each) == 1 for each in by_place.values())
        assert len(set.union(*by_place.values())) == len(by_place)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_microbatch_draws_the_same_in_each_layout(layout):
    """Dense layers of the first context-parallel rank, by the number in the global batch."""

    def numbered() -> dict[int, int]:
        size, rank = (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
        )
        drawn = {}
        for microbatch in range(8 // size):
            set_microbatch_key(3, 10, microbatch)
            drawn[microbatch * size + rank] = microbatch_key(False)
        return drawn if parallel_state.get_context_parallel_rank() == 0 else {}

    [alone] = on_each_rank({}, numbered, ranks=1)
    together = {k: v for drawn in on_each_rank(layout, numbered) for k, v in drawn.items()}
    assert together == alone


def test_a_key_does_not_change_the_generators_numbers():
    state = torch.get_rng_state()
    expected = torch.rand(3)
    torch.set_rng_state(state)
    on_each_rank({}, keys, ranks=1)
    assert torch.equal(torch.rand(3), expected)
