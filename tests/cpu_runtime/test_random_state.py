"""Seed and draws in the state of torch's CPU generator."""

import pytest
import torch

from megatron_lowbit.cpu_runtime.megatron_patches import with_seed


@pytest.fixture(autouse=True)
def default_generator():
    """Generator with seed 3, whose state is restored after the test."""
    before = torch.get_rng_state()
    torch.manual_seed(3)
    yield
    torch.set_rng_state(before)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("drawn", [0, 1, 1000])
def test_another_seed_and_the_same_draws(seed, drawn):
    torch.rand(drawn)
    state = torch.get_rng_state()
    expected = torch.rand(700), torch.randn(3), torch.randint(9, (5,))
    torch.set_rng_state(with_seed(state, seed))
    # torch reads it as a signed number.
    assert torch.initial_seed() % 2**64 == seed
    found = torch.rand(700), torch.randn(3), torch.randint(9, (5,))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_given_state_stays():
    state = torch.get_rng_state()
    with_seed(state, 17)
    assert torch.equal(state, torch.get_rng_state()) and torch.initial_seed() == 3


def test_the_first_seed_comes_back():
    state = torch.get_rng_state()
    assert torch.equal(with_seed(with_seed(state, 17), 3), state)
