"""Zeros for kernels: of one fill, and none used twice."""

import pytest
import torch

from megatron_lowbit.kernels import amaxes as zeros

SHAPES = [(), (3,), (4, 8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_a_fill_are_aligned_and_lie_apart(shape):
    parts = zeros._filled(shape, torch.device("cpu")).unbind()
    for number, part in enumerate(parts, 1):
        assert part.shape == shape and part.data_ptr() % 16 == 0
        part += number
    assert all((part == number).all() for number, part in enumerate(parts, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_none_is_given_twice(shape):
    for _ in range(2 * zeros._BATCH + 1):
        part = zeros.zeros_of(shape, torch.device("cuda", 0))
        assert not part.any()
        part += 1
