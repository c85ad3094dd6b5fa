"""What the sentinels see and count."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.training.sentinels import BadSteps, DataPosition, gradients_are_finite


def chunk(*values, expert=()):
    def buffers(entries):
        return [SimpleNamespace(grad_data=torch.tensor(entry)) for entry in entries]

    return SimpleNamespace(buffers=buffers(values), expert_parallel_buffers=buffers(expert))


def test_position_moves_past_bad_ranges_that_touch():
    position = DataPosition(0, [(8, 12), (12, 16), (20, 24)])
    seen = []
    for _ in range(5):
        position.skip_bad()
        seen.append(position.samples)
        position.samples += 4
    assert seen == [0, 4, 16, 24, 28]


def test_position_tells_whether_it_moved():
    position = DataPosition(4, [(4, 8)])
    assert position.skip_bad() and position.samples == 8
    assert not position.skip_bad()


def test_bad_steps_must_come_in_a_row():
    steps = BadSteps(limit=2)
    steps.bad(0, 4)
    assert not steps.too_many
    steps.good()
    steps.bad(8, 12)
    assert not steps.too_many
    steps.bad(12, 16)
    assert steps.too_many and steps.ranges == [(8, 12), (12, 16)]


def test_going_back_twice_without_a_good_step_is_futile():
    steps = BadSteps(limit=1)
    steps.bad(0, 4)
    assert steps.too_many and not steps.futile
    steps.gone_back()
    assert not steps.too_many and steps.futile
    steps.good()
    assert not steps.futile


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_gradients(wrong):
    assert gradients_are_finite([chunk([1.0, -3e38]), chunk([0.0], expert=[[2.0]])])
    assert not gradients_are_finite([chunk([1.0]), chunk([0.0, wrong])])
    assert not gradients_are_finite([chunk([1.0], expert=[[wrong, 0.0]])])
    assert gradients_are_finite([chunk(), chunk([])])
