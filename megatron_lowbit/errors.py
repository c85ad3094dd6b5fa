"""The one exception that stands for bad input, and how a command ends on it."""

import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(ValueError):
    """Bad input. The message is one line: the argument, file or key, and what would be right."""


def exit_on_user_error(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` and leave the process: its return code, or ``error: ...`` and 2 on bad input."""
    try:
        code = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code or 0)
