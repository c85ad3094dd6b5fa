"""Shared parts of the tests of recipes: formats are forgotten, and errors have one line."""

from collections.abc import Callable, Iterator

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import FORMATS


@pytest.fixture(autouse=True)
def known(monkeypatch) -> Iterator[None]:
    """Forget the formats and files that a test registers."""
    monkeypatch.setattr("megatron_lowbit.numerics.extra_formats._contents", {})
    before = dict(FORMATS)
    yield
    FORMATS.clear()
    FORMATS.update(before)


def refused(call: Callable, *arguments, parts=()) -> str:
    """Call a function that raises UserError; return its message, one line with these parts."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message
