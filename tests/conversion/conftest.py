"""Tests of conversions; adds the folder of helpers to the import path."""

import sys
from pathlib import Path

import tests.imported  # noqa: F401  before objects are exempt from garbage collection
from tests.short_runs import short_runs  # noqa: F401

# pytest's importlib mode adds no paths.
sys.path.insert(0, str(Path(__file__).parent))
