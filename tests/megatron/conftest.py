"""Fixtures of tests that run Megatron-LM in this process."""

import shlex

import pytest

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.megatron.datasets import provide_datasets
from tests.megatron.tiny_models import one_rank
from tests.single_process import short_runs, single_process  # noqa: F401

# isort: split
from megatron.core import parallel_state


@pytest.fixture
def build_datasets():
    """Function that builds the datasets of a command line by Megatron-LM."""

    def build(line: str, samples: tuple) -> tuple:
        parse_arguments(shlex.split(line))
        parallel_state.initialize_model_parallel()
        return provide_datasets(samples)

    with one_rank():
        yield build
