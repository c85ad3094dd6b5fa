"""Tests of checkpoints' files; adds the folder of helpers for conversions to the import path."""

import sys
from pathlib import Path

from tests.short_runs import short_runs  # noqa: F401

# pytest's importlib mode adds no paths.
sys.path.insert(0, str(Path(__file__).parents[1] / "conversion"))
