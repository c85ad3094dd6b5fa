"""A dataset of Megatron-LM, and a disk that is full, in effect."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

import megatron_lowbit.cpu_runtime  # noqa: F401  before megatron.core


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
