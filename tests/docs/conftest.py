"""Generators of pages import one another by their names."""

import sys
from pathlib import Path

GENERATE = Path(__file__).parents[2] / "docs" / "generate"
sys.path[:0] = [str(Path(__file__).parent), str(GENERATE)]
