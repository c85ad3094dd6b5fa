"""Fixtures of tests that run Megatron-LM in this process."""

import shlex

import pytest
import torch

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.megatron.datasets import provide_datasets
from megatron_lowbit.megatron.pretrain import teardown
from tests.single_process import short_runs, single_process  # noqa: F401

# isort: split
from megatron.core import parallel_state


@pytest.fixture
def build_datasets(monkeypatch):
    """Function that builds the datasets of a command line by Megatron-LM."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    def build(line: str, samples: tuple) -> tuple:
        parse_arguments(shlex.split(line))
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        return provide_datasets(samples)

    with teardown():
        yield build
