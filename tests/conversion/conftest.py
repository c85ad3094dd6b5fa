"""Tests of conversions; adds the folder of helpers to the import path."""

import sys
from pathlib import Path

import pytest

import tests.imported  # noqa: F401  before objects are exempt from garbage collection
from tests.short_runs import without_pictures

# pytest's importlib mode adds no paths.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    with without_pictures():
        yield
