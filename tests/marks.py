"""Marks of parametrized tests."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def others_slow(values: Iterable[Any], first: Collection[Any]) -> list:
    """Return parameters of a test, of which those that are not in ``first`` are slow."""
    return [pytest.param(one, marks=[pytest.mark.slow] * (one not in first)) for one in values]


def by_turns(first: Collection[Any], second: Collection[Any]) -> list:
    """Return all pairs; quick ones have each of ``first`` once, with ``second`` by turns."""
    return [
        pytest.param(one, other, marks=[pytest.mark.slow] * (i % len(second) != j))
        for (i, one), (j, other) in product(enumerate(first), enumerate(second))
    ]
