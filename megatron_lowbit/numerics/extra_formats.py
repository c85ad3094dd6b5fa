"""Formats from outside the package: Python files that recipes name, and entry points.

Both run code: of a file that the user's recipe names, or of an installed package.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from torch.serialization import add_safe_globals

from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats import FORMATS

ENTRY_POINTS = "megatron_lowbit.formats"
"""Group of entry points, each of which names a sequence of formats: ``package.module:FORMATS``."""
_contents: dict[str, bytes] = {}  # of the files that were loaded, by module name
_refusal: ContextVar[str | None] = ContextVar("refusal", default=None)


@contextmanager
def refuse_format_files(advice: str) -> Iterator[None]:
    """Run no format file that is new: for recipes that a checkpoint names, and not the user.

    Args:
        advice: end of the message of the ValueError that such a file raises.
    """
    token = _refusal.set(advice)
    try:
        yield
    finally:
        _refusal.reset(token)


def load_format_file(path: str) -> str:
    """Run a Python file and register its ``FORMATS``; return the path.

    A file that was loaded before is not run again, so that its classes stay the same. Its module is
    named only by the file's name: quantized tensors that are pickled load wherever the file lies.

    Raises:
        ValueError: the file cannot be read or run, has no formats, or one whose name is taken.
    """
    file, source = Path(path), f"format file {path}"
    if file.suffix != ".py":
        raise ValueError(f"{source}: its name must end in .py")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}") from None
    name = f"megatron_lowbit_formats_{file.stem}"
    if name in _contents:
        if _contents[name] != content:
            raise ValueError(f"{source}: another {file.name} was loaded before; rename one of them")
        return path
    if (advice := _refusal.get()) is not None:
        raise ValueError(f"{source}: not run; {advice}")
    module = ModuleType(name)
    module.__file__ = str(file.absolute())
    sys.modules[name] = module  # dataclasses and pickle look it up
    try:
        exec(compile(content, module.__file__, "exec"), module.__dict__)
        _register(getattr(module, "FORMATS", ()))
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{source}: {_line_of(error, module.__file__)}{error}") from error
    _contents[name] = content
    return path


@cache
def load_entry_points() -> None:
    """Register the formats of all installed packages that have entry points for them.

    Raises:
        ValueError: a package cannot be imported, has no formats, or one whose name is taken.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            _register(point.load())
        except Exception as error:
            raise ValueError(
                f"entry point {point.name} = {point.value} of {ENTRY_POINTS}: {error}"
            ) from error


def _register(formats: Iterable[BlockFormat]) -> None:
    """Add formats to ``FORMATS``, and their classes to those that torch unpickles.

    Raises:
        ValueError: there are none, or one is no format, has a name that is taken, or the attribute
            ``scale_kernel`` of versions up to 0.2.0.
    """
    given = tuple(formats)
    new = {format.name: format for format in given if isinstance(format, BlockFormat)}
    if not new or len(new) != len(given):
        raise ValueError("FORMATS must be a tuple of BlockFormat objects with different names")
    for name, format in new.items():
        if name in FORMATS:
            raise ValueError(f"there is a format {name} already; name the new one otherwise")
        if hasattr(format, "scale_kernel"):
            raise ValueError(
                f"{name}.scale_kernel has no effect: register the class with "
                "megatron_lowbit.kernels.support.kernel_of"
            )
    add_safe_globals([*{type(format) for format in new.values()}])
    FORMATS.update(new)


def _line_of(error: Exception, file: str) -> str:
    """Return the line of a file, and the kind of error, where its code raised an error."""
    if isinstance(error, SyntaxError):
        return ""  # its message names the line
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return f"line {lines[-1]}: {type(error).__name__}: " if lines else ""
