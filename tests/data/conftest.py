"""Datasets of Megatron-LM's, and a disk that is full, in effect."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest

import megatron_lowbit.cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


@pytest.fixture(scope="session")
def write_dataset() -> Callable[..., str]:
    """Function that writes documents of consecutive ids, and returns the prefix."""

    def write(prefix, lengths=(25,) * 40, first_token=0, dtype=np.uint16) -> str:
        builder, begin = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype), 0
        for length in lengths:
            builder.add_document(first_token + np.arange(begin, begin + length) % 990, [length])
            begin += length
        builder.finalize(f"{prefix}.idx")
        return str(prefix)

    return write


@pytest.fixture
def prefix(write_dataset, tmp_path) -> str:
    """A dataset of 40 documents."""
    return write_dataset(tmp_path / "data")


@pytest.fixture
def file_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Give a context in which no file can grow beyond a number of bytes."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
