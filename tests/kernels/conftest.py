"""Memory that kernels are given."""

import pytest
import torch


@pytest.fixture
def not_a_number_in_free_memory(monkeypatch):
    """Fill memory for codes with what is no number in FP8."""
    empty = torch.empty

    def filled(*size, **options):
        memory = empty(*size, **options)
        if memory.element_size() == 1:
            memory.view(torch.uint8).fill_(0xFF)
        return memory

    monkeypatch.setattr(torch, "empty", filled)
