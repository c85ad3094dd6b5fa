"""Tests of layers; adds the folder of helpers to the import path."""

import sys
from pathlib import Path

# pytest's importlib mode adds no paths.
sys.path.insert(0, str(Path(__file__).parent))
