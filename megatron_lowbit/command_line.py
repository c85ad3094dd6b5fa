"""What command lines have in common."""

import sys
from collections.abc import Sequence


def split_at_dashes(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """A command's own arguments, and those behind ``--`` that it hands on; None is sys.argv."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]
