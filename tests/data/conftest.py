"""A dataset of Megatron-LM."""

import pytest

import megatron_lowbit.cpu_runtime  # noqa: F401  before megatron.core


@pytest.fixture
def prefix(write_dataset, tmp_path) -> str:
    """A dataset of 40 documents."""
    return write_dataset(tmp_path / "data")
