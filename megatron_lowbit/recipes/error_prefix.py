"""Place of an error in a recipe, put before its message."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lowbit.errors import UserError


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Turn a ValueError into a UserError whose message begins with the prefix."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None
