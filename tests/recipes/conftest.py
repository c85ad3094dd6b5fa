"""Shared part of the tests of recipes: errors of one line."""

from collections.abc import Callable

import pytest

from megatron_lowbit.errors import UserError


def refused(call: Callable, *arguments, parts=()) -> str:
    """Call a function that raises UserError; return its message, one line with these parts."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message
