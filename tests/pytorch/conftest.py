"""Tests of recipes in plain PyTorch models; adds the folder of helpers to the import path."""

import sys
from pathlib import Path

import pytest

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.pytorch import linear

# pytest's importlib mode adds no paths.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def reference(monkeypatch):
    """Let layers take the reference engine, which compiles nothing itself."""
    monkeypatch.setattr(linear, "select_engine", lambda device: ReferenceEngine("tests"))
