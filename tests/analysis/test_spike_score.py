"""The spike score against the equation, written out step by step."""

import math

import numpy as np
import pytest

from megatron_lowbit.analysis.comparison import spike_score


def by_the_equation(losses):
    last = losses[-math.ceil(len(losses) * 3 / 10) :]
    mean = sum(last) / len(last)
    sigma = math.sqrt(sum((loss - mean) ** 2 for loss in last) / len(last))
    total = 0.0
    for t, loss in enumerate(losses):
        minimum = min(losses[max(0, t - 7) : t + 1])
        total += max((loss - minimum) / sigma - 3, 0)
    return total


@pytest.mark.parametrize("steps", [4, 7, 8, 9, 10, 50, 333])
def test_equals_the_equation(steps):
    random = np.random.default_rng(steps)
    losses = 4 / np.sqrt(np.arange(1, steps + 1)) + 0.02 * random.standard_normal(steps)
    losses[random.integers(0, steps, size=steps // 10)] += 1.0
    assert spike_score(losses) == pytest.approx(by_the_equation(losses.tolist()), rel=1e-12)


def test_by_hand():
    """The last 6 of 20 steps alternate, so sigma is 1: a spike of 10 over the minimum scores 7."""
    losses = [5.0] * 20
    losses[14:] = [4.0, 6.0] * 3
    assert spike_score(losses) == 0.0
    losses[8] = 15.0
    assert spike_score(losses) == 7.0
    losses[9] = 12.0  # 7 over the minimum
    assert spike_score(losses) == 7.0 + 4.0


def test_the_minimum_is_over_eight_steps():
    noise = [0.0, 2.0] * 10  # sigma 1
    step_up = [0.0] * 20 + [10.0] * 20 + noise
    # 8 steps look back on the low level, of which the first is on the high one: 7 of them score.
    assert spike_score(step_up) == pytest.approx(7 * 7.0)


def test_steps_that_are_not_finite_are_left_out():
    losses = [5.0] * 14 + [4.0, 6.0] * 3
    losses[8] = 15.0
    broken = [*losses[:3], math.nan, *losses[3:], math.inf]
    assert spike_score(broken) == spike_score(losses) == 7.0


@pytest.mark.parametrize("losses", [[], [1.0], [3.0, 2.0, 1.0], [1.0] * 100, [math.nan] * 10])
def test_undefined_without_deviation(losses):
    assert math.isnan(spike_score(losses))


def test_scale_does_not_matter():
    losses = np.random.default_rng(0).standard_cauchy(200)
    assert spike_score(losses) > 0
    assert spike_score(100 + 8 * losses) == pytest.approx(spike_score(losses))
