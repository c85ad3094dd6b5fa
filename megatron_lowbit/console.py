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


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal.

    A pipe or file gets a line of text for each row, with columns aligned by blanks.
    """
    if sys.stdout.isatty():
        plain_console().print(table)
        return
    table.box, table.pad_edge, table.padding = None, False, (0, 2, 0, 0)
    wide = plain_console(_UNLIMITED)
    with wide.capture() as capture:
        wide.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())
