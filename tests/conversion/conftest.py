"""Tests of conversions; adds the folders of helpers and tools to the import path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
# pytest's importlib mode adds no paths.
sys.path[:0] = map(str, (HERE, HERE.parents[1] / "tools"))
