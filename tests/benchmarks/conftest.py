"""Paths of the package of benchmarks and of the generators of pages."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "generate")]
