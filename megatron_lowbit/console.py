"""The console that tables are printed on."""

import sys

from rich.console import Console
from rich.table import Table

_UNLIMITED = 10_000  # columns


def plain_console(width: int | None = None) -> Console:
    """Return a console that prints text as it is.

    Names come from users' files. Rich would take what they hold in brackets for markup, and words
    between colons for emoji.

    Args:
        width: columns where standard output is no terminal; rich assumes 80, which breaks names.
    """
    terminal = sys.stdout.isatty()
    return Console(
        width=None if terminal else width, force_terminal=terminal, markup=False, emoji=False
    )


def print_report(*parts: str | Table) -> None:
    """Print lines and tables as wide as the terminal.

    A pipe or file gets a line of text for each row of a table, its columns aligned by blanks.
    """
    console = plain_console(_UNLIMITED)
    if sys.stdout.isatty():
        for part in parts:
            console.print(part)
        return
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, Table):
                part.box, part.pad_edge, part.padding = None, False, (0, 2, 0, 0)
            console.print(part)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    console.print("\n".join(lines), soft_wrap=True)
