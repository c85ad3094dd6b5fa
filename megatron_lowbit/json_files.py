"""Reading JSON that others wrote: whatever it holds, an error is one line that names the source.

``NaN`` and infinities are read, since Hugging Face's files hold them; :class:`Entries` refuses them
where a number is meant.
"""

import json
import math
import os
import reprlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.folders import reading

MAX_BYTES = 2**27
"""Most bytes of a file: several times the largest tokenizer.json, and little memory."""
MAX_DEPTH = 100
"""Levels of a file, well below what Python's functions can descend to."""
_INT32 = 2**31 - 1
_Kind = TypeVar("_Kind")


def parse_json(text: bytes | str, source: str) -> Any:
    """Parse a JSON value; raise a UserError that names the source where it is none.

    A key that an object has twice is an error: readers differ in which value they take.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise UserError(f"{source}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise UserError(f"{source}: not valid JSON ({error})") from None


def read_object(path: Path, argument: str = "") -> dict[str, Any]:
    """Read a JSON object; raise a UserError that names the file where there is none.

    ``argument``: the argument of the command line that names the file, for the error.
    """
    source = f"{argument} {path}".lstrip()
    with reading(source):
        if not path.is_file():
            raise UserError(f"{source} is {'no file' if path.exists() else 'missing'}")
    content = parse_json(read_small(path, source), source)
    _check_depth(content, source)
    return as_object(content, source)


def read_small(path: Path, source: str = "") -> bytes:
    """Read a file; raise a UserError that names the source where it is larger than such files are.

    ``source``: what the error begins with; the path by default.
    """
    source = source or str(path)
    with reading(source):
        size = path.stat().st_size
        require(size <= MAX_BYTES, f"{source}: has {size} bytes, more than {MAX_BYTES}")
        return path.read_bytes()


def as_object(content: Any, source: str) -> dict[str, Any]:
    """Return parsed JSON that is an object; raise a UserError that names the source otherwise."""
    if not isinstance(content, dict):
        raise UserError(f"{source}: holds no JSON object, but {reprlib.repr(content)}")
    return content


_NAME_MAX, _PATH_MAX = 255, 4096
"""Most bytes of a file's name, and of a path, on Linux."""


def is_inside(name: Any) -> bool:
    """Tell whether parsed JSON is the name of a file below a folder, or in it."""
    try:
        encoded = os.fsencode(name)
    except (TypeError, UnicodeEncodeError):
        return False
    path = PurePosixPath(name)
    is_below = path.name != "" and not path.is_absolute() and ".." not in path.parts
    # The folder's own path takes the other half.
    fits = len(encoded) < _PATH_MAX // 2
    fits = fits and all(len(part) <= _NAME_MAX for part in encoded.split(b"/"))
    return is_below and fits and b"\0" not in encoded


class Entries:
    """Typed access to a JSON object's entries.

    An entry that is missing or null has its method's default; without one it is an error. All
    errors are UserErrors that name the key and the source: the file, or the file and the key that
    holds the object.
    """

    def __init__(self, content: Any, source: str) -> None:
        self._content, self._source = as_object(content, source), source

    def __len__(self) -> int:
        return len(self._content)

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def integer(
        self, key: str, default: int | None = None, minimum: int = 1, maximum: int = _INT32
    ) -> int:
        """Return an integer in a range."""
        value = self._value(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._error(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(
        self, key: str, default: float | None = None, above: float = -math.inf,
        up_to: float = sys.float_info.max,
    ) -> float:  # fmt: skip
        """Return a finite number above a bound, and up to another one."""
        value = self._value(key, default)
        if value is default:
            return float(value)
        bound = "" if above == -math.inf else f" above {above:g}"
        bound += "" if up_to == sys.float_info.max else f" and up to {up_to:g}"
        if type(value) not in (int, float) or not above < value <= up_to:
            raise self._error(key, value, f"a finite number{bound}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value."""
        return self._of_type(bool, key, default, "true or false")

    def string(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        return self._of_type(str, key, default, "a string")

    def strings(self, key: str) -> list[str]:
        """Return a list of strings; an empty one by default."""
        return self._list_of(str, key, "strings")

    def integers(self, key: str) -> list[int]:
        """Return a list of integers; an empty one by default."""
        return self._list_of(int, key, "integers")

    def inner(self, key: str) -> "Entries":
        """Return the entries of an object; one without entries by default."""
        return Entries(self._value(key, {}), f"{self._source}: {key}")

    def updated(self, key: str, value: Any) -> "Entries":
        """Return these entries with another value of one."""
        return Entries({**self._content, key: value}, self._source)

    def objects(self, key: str) -> "list[Entries]":
        """Return the objects of a list; an empty one by default."""
        value = self._value(key, [])
        if not isinstance(value, list):
            raise self._error(key, value, "a list of objects")
        return [Entries(entry, f"{self._source}: {key}") for entry in value]

    def inner_objects(self) -> "list[Entries]":
        """Return this object's entries, each of which is an object itself."""
        return [Entries(value, f"{self._source}.{key}") for key, value in self._content.items()]

    def _of_type(self, wanted: type[_Kind], key: str, default: _Kind | None, good: str) -> _Kind:
        value = self._value(key, default)
        if not isinstance(value, wanted):
            raise self._error(key, value, good)
        return value

    def _list_of(self, wanted: type[_Kind], key: str, name: str) -> list[_Kind]:
        value = self._value(key, [])
        if not (isinstance(value, list) and all(type(entry) is wanted for entry in value)):
            raise self._error(key, value, f"a list of {name}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self._content.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self._source}: needs the entry {key!r}")
        return value

    def _error(self, key: str, value: Any, good: str) -> UserError:
        return UserError(f"{self._source}: {key} {reprlib.repr(value)}: must be {good}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"a second key {reprlib.repr(counts.most_common(1)[0][0])}")
    return content


def _check_depth(content: Any, source: str) -> None:
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise UserError(f"{source}: nested more than {MAX_DEPTH} deep")
