"""Marks of parametrized tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_slow(values: Iterable[Any], first: Collection[Any]) -> list:
    """Return parameters of a test, of which those that are not in ``first`` are slow."""
    return [pytest.param(one, marks=[pytest.mark.slow] * (one not in first)) for one in values]
