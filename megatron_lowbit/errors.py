"""The exceptions that stand for bad input and for a lost run, and how a command ends on them."""

import ast
import errno
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any, NoReturn, TextIO, TypeVar

_PLACES = {
    errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENOENT,
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
}  # fmt: skip
"""Errors of the operating system that say that a path or a disk is unfit."""

_Error = TypeVar("_Error", bound=BaseException)


class _Printable:
    """Base of exceptions whose messages quote users' text: control characters are escaped."""

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(_Printable, ValueError):
    """Bad input. The message is one line: the argument, file or key, and what would be right."""


class TrainingError(_Printable, RuntimeError):
    """A run that cannot go on, through no fault of its arguments. The message is one line."""


def printable(text: str) -> str:
    r"""Escape as ``repr`` does what moves a terminal's cursor or has no glyph: ``\x1b``, ``\n``."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print lines at once, each as :func:`printable` escapes it; by default on the terminal."""
    print(*map(printable, lines), sep="\n", file=file or terminal(), flush=True)


def terminal() -> TextIO:
    """Return standard output, also while a run's log has taken its place (``--short-log``)."""
    return getattr(sys.stdout, "terminal", sys.stdout)


def require(condition: bool, message: str) -> None:
    """Raise a UserError with the message where the condition does not hold."""
    if not condition:
        raise UserError(message)


def requiring(source: str) -> Callable[[bool, str], None]:
    """Return :func:`require` for messages about a source, such as a file, which they begin with."""
    return lambda condition, message: require(condition, f"{source}: {message}")


def require_type(name: str, value: object, expected: Any, wanted: str) -> None:
    """Raise TypeError for an argument of another type: "x is a NumPy array, not a tensor"."""
    if not isinstance(value, expected):
        given = type(value).__name__
        given = f"{'an' if given[0].lower() in 'aeiou' else 'a'} {given}"
        given = {"a NoneType": "None", "a ndarray": "a NumPy array"}.get(given, given)
        raise TypeError(f"{name} is {given}, not {wanted}")


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Turn a ValueError into a UserError whose message begins with the prefix."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None


@contextmanager
def as_user_error(message: str) -> Iterator[None]:
    """Raise a UserError for whatever a library raises on a bad file, panics of its Rust code, too.

    Errors of one line, of the operating system, and of too little memory pass, as does the end of
    the process or of a generator that waits within.
    """
    try:
        yield
    except (UserError, TrainingError, OSError, MemoryError):
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        why = shorten(f"{type(error).__name__}: {error}", 400)
        raise UserError(f"{message} ({why})") from error


def failed_check(error: BaseException) -> str:
    """Return the condition of the assertion that failed, or the line that raised another error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    source, line = "".join(linecache.getlines(frame.filename)), frame.lineno or 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or 0):
            return ast.unparse(node.test)
    return frame.line or ""


def error_behind(error: BaseException, error_type: type[_Error]) -> _Error | None:
    """Return the exception of a type that is another one or caused it; None if there is none."""
    if isinstance(error, error_type):
        return error
    causes = [error.__cause__, error.__context__]
    # torch's CheckpointException: one failure for each rank.
    causes += [failure for failure, _ in getattr(error, "failures", {}).values()]
    behind = (error_behind(cause, error_type) for cause in causes if cause)
    return next(filter(None, behind), None)


def exit_on_user_error(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` and leave the process.

    The exit code is main's; ``error: ...`` goes before 2 on bad input, and before 1 where a run
    cannot go on. After Ctrl-C it is 130, as shells have it, after the interrupt's own message.
    """
    _open_closed_streams()
    try:
        code = main()
    except (UserError, TrainingError) as error:
        # In one piece: the ranks of a node may say it at the same time.
        sys.stderr.write(f"error: {error}\n")
        code = 2 if isinstance(error, UserError) else 1
    except OSError as error:
        if error.errno not in _PLACES:
            raise
        path = "" if error.filename is None else f"{error.filename}: "
        sys.stderr.write(f"error: {printable(path)}{error.strerror}\n")
        code = 2
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"{printable(str(interrupt)) or 'interrupted'}\n")
        code = 130
    sys.exit(code or 0)


def _open_closed_streams() -> None:
    """Open the null device in the place of standard streams that are closed, as after ``>&-``.

    Python has None for these, and the first file that is opened would get the number of the stream,
    so that others' output would go into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open until the end
