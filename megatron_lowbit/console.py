"""The console that tables are printed on."""

import sys

from rich.console import Console


def plain_console(width: int | None = None) -> Console:
    """Return a console that prints text as it is.

    Names come from users' files. Rich would take what they hold in brackets for markup, and words
    between colons for emoji.

    Args:
        width: columns where standard output is no terminal; rich assumes 80, which breaks names.
    """
    return Console(width=None if sys.stdout.isatty() else width, markup=False, emoji=False)
