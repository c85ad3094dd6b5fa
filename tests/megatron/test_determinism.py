"""Deterministic runs."""

from argparse import Namespace

import pytest
import torch

from megatron_lowbit.megatron.pretrain import unfilled_memory


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", [True, False])
def test_memory_is_filled_unless_megatron_lm_asks_for_determinism(mode):
    """Without the mode, torch's setting is a user's own."""
    with unfilled_memory(Namespace(deterministic_mode=mode)):
        assert torch.empty(2**20).isnan().all() != mode
    assert torch.empty(2**20).isnan().all()
