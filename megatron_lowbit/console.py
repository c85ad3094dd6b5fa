"""The console that tables are printed on."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_lowbit.errors import printable, terminal

_UNLIMITED = 10_000  # columns


class _PlainConsole(Console):
    """Console that prints strings, in tables too, without markup and with characters escaped."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a string as a renderable; its lines stay lines."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **settings)


def plain_console(width: int | None = None, stderr: bool = False) -> Console:
    """Return a console that prints text as it is, but for control characters.

    Names come from users' files. Rich would take what they hold in brackets for markup, and words
    between colons for emoji, and would hand escape sequences on to the terminal. Where the stream
    is no terminal it has ``width`` columns; rich assumes 80, which breaks names.
    """
    stream = sys.stderr if stderr else terminal()
    return _PlainConsole(
        width=None if stream.isatty() else width,
        file=stream,
        force_terminal=stream.isatty(),
        markup=False,
        emoji=False,
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
