"""Fixtures with megatron.core's process groups and random states for one process."""

import pytest
import torch

import tests.imported  # noqa: F401  before objects are exempt from garbage collection
from megatron_lowbit.megatron.pretrain import teardown
from tests.short_runs import short_runs  # noqa: F401

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed


@pytest.fixture(scope="module")
def single_process():
    with teardown():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(5)
        yield
