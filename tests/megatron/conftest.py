"""A world of one process, for what asks megatron.core for its groups or random states."""

from argparse import Namespace

import pytest

from megatron_lowbit.training.distributed import initialize_distributed, shutdown


@pytest.fixture(scope="module")
def single_process():
    initialize_distributed(
        Namespace(
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            context_parallel_size=1,
            expert_model_parallel_size=1,
            distributed_timeout_minutes=1,
            seed=5,
        )
    )
    yield
    shutdown()
