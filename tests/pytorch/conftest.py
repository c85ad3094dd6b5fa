"""Tests of recipes in plain PyTorch models; adds the folder of helpers to the import path."""

import sys
from pathlib import Path

import pytest

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import compiled
from megatron_lowbit.pytorch import linear

# pytest's importlib mode adds no paths.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def reference(monkeypatch):
    """Let layers take the reference engine, which compiles nothing itself."""
    engine = ReferenceEngine("tests")
    for module in (compiled, linear):
        monkeypatch.setattr(module, "select_engine", lambda device: engine)
