"""Process groups of one process, and randomness as a function of the step."""

import random

import numpy as np
import pytest
import torch
from tiny_gpt import parallel_args

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics.philox import derive_key
from megatron_lowbit.training.distributed import (
    initialize_distributed,
    print_rank0,
    rank,
    set_iteration_seed,
    set_step,
    shutdown,
)

# isort: split
from megatron.core import tensor_parallel


@pytest.fixture
def single_process():
    initialize_distributed(parallel_args())
    yield
    shutdown()


def drawn() -> list[float]:
    device = torch.cuda.current_device()
    values = [random.random(), np.random.random(), torch.rand((), device=device).item()]
    with tensor_parallel.get_cuda_rng_tracker().fork():
        values.append(torch.rand((), device=device).item())
    return values


def test_one_process_needs_no_launcher(single_process, capsys):
    assert torch.distributed.get_world_size() == 1
    assert rank() == 0
    print_rank0("loss", 1.5)
    assert capsys.readouterr().out == "loss 1.5\n"


def test_everything_is_seeded_and_can_be_set_up_again():
    values = []
    for seed in (1, 1, 2):
        initialize_distributed(parallel_args(seed=seed))
        values.append(drawn())
        shutdown()
    assert values[0] == values[1]
    assert not set(values[0]) & set(values[2])
    shutdown()
    assert rank() == 0


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 3}])
def test_world_size_must_be_divisible(sizes):
    with pytest.raises(
        UserError, match="world size 1 is not divisible by --tensor-model"
    ) as caught:
        initialize_distributed(parallel_args(**sizes))
    assert f"start a multiple of {next(iter(sizes.values()))} processes" in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_experts_must_fit_the_world():
    args = parallel_args()
    args.expert_model_parallel_size = 4
    with pytest.raises(UserError, match="--expert-model-parallel-size 4"):
        initialize_distributed(args)


def test_step_key_is_the_published_hash(single_process):
    set_step(3, 10, 2)
    assert torch.initial_seed() == derive_key(3, 10, 2, 0) % 2**63
    keys = set()
    for step in [(3, 10, 2), (3, 10, 1), (3, 9, 2), (4, 10, 2), (3, 2, 10)]:
        torch.rand(5)
        set_step(*step)
        assert 0 <= torch.initial_seed() < 2**63
        keys.add(torch.initial_seed())
    assert len(keys) == 5


def test_iteration_seed_forgets_what_was_drawn(single_process):
    values = []
    for iteration in (1, 2, 1):
        set_iteration_seed(3, iteration)
        values.append(drawn()[2:])
        drawn()
    assert values[0] == values[2]
    assert not set(values[0]) & set(values[1])
