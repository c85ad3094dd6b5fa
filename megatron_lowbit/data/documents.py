"""Documents of a file: JSON records or text, told apart by the content, compressed or not."""

import json
import lzma
import re
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import parse_json

_COMPRESSED = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "bz2": re.compile(rb"BZh[1-9]1AY&SY"),
    "lzma": re.compile(rb"\xfd7zXZ\0"),
    # A frame, or the frame without data that pzstd writes first.
    "backports.zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
"""Modules that decompress, by the first bytes of their files."""
_MOST_BYTES = 1 << 30
"""Limit of a line, and of a compressed text: a small file may decompress to more than memory."""
_LINES_NAME = re.compile(r"\.(jsonl|ndjson|jsonlines)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_JSON_NAME = re.compile(r"\.json(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_OBJECT = re.compile(rb'(\xef\xbb\xbf)?\s*\{\s*["}]')
_OBJECTS = re.compile(rb'(\xef\xbb\xbf)?\s*\[\s*\{\s*["}]')


class Document(NamedTuple):
    """One document: a text for each JSON key, and its share of the bytes of its file."""

    texts: tuple[str, ...]
    source_bytes: float


class OpenFile(NamedTuple):
    """A file as it is ``stored``, and the same file ``unpacked`` for reading."""

    path: Path
    stored: BinaryIO
    unpacked: BinaryIO


@contextmanager
def open_file(path: Path) -> Iterator[OpenFile]:
    """Open a file, decompressed if its first bytes are those of a compressed file.

    Raises:
        UserError: the file cannot be read, is damaged, or needs a package that is not installed.
    """
    try:
        with path.open("rb") as stored:
            head = stored.read(16)
            stored.seek(0)
            name = next((name for name, magic in _COMPRESSED.items() if magic.match(head)), None)
            if name is None:
                yield OpenFile(path, stored, stored)
                return
            with _decompressed(path, stored, name) as unpacked:
                yield OpenFile(path, stored, unpacked)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


@contextmanager
def _decompressed(path: Path, stored: BinaryIO, name: str) -> Iterator[BinaryIO]:
    try:
        module = import_module(name)
    except ImportError:
        raise UserError(
            f"{path}: decompress it, or install its reader: pip install {name}"
        ) from None
    try:
        with module.open(stored) as unpacked:
            yield unpacked
    except (EOFError, lzma.LZMAError, zlib.error, getattr(module, "ZstdError", EOFError)) as error:
        raise UserError(f"{path}: a damaged compressed file ({error})") from None


def holds_lines(file: OpenFile) -> bool:
    """Return whether a file has one JSON object per line, by its name or its first two lines."""
    if _LINES_NAME.search(file.path.name):
        return True
    lines = iter(partial(file.unpacked.readline, _MOST_BYTES), b"")
    first, second = [*islice((line for line in lines if line.strip()), 2), b"", b""][:2]
    file.unpacked.seek(0)
    if not (second and _OBJECT.match(first)):
        return False
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(first), dict)
    return bool(_OBJECT.match(second))


def read_lines(file: OpenFile, keys: Sequence[str]) -> Iterator[Document]:
    """Yield a document for each line that is not empty.

    Raises UserError, naming file:line, for a malformed line or a missing key.
    """
    read = 0
    for number, line in enumerate(iter(partial(file.unpacked.readline, _MOST_BYTES), b""), 1):
        place = f"{file.path}:{number}"
        require(len(line) < _MOST_BYTES, f"{place}: longer than {_MOST_BYTES >> 30} GiB")
        if line.strip():
            texts = _texts_of(parse_json(line, place), keys, place)
            position = file.stored.tell()
            yield Document(texts, position - read)
            read = position


def read_content(file: OpenFile) -> bytes:
    """Return the whole content. Raises UserError for more than 1 GiB from a compressed file."""
    if file.unpacked is file.stored:
        return file.stored.read()
    content = file.unpacked.read(_MOST_BYTES + 1)
    require(
        len(content) <= _MOST_BYTES,
        f"{file.path}: decompresses to a text of more than {_MOST_BYTES >> 30} GiB; decompress it",
    )
    return content


def text_in(content: bytes) -> str | None:
    """Return a content's text; None for an archive of tar and for what is not UTF-8."""
    if content[257:262] == b"ustar":
        return None
    with suppress(UnicodeDecodeError):
        return content.decode("utf-8")
    return None


def read_records(
    path: Path, content: bytes, keys: Sequence[str], is_named: bool
) -> list[tuple[str, ...]] | None:
    """Return the texts of each record of a content that is JSON as a whole; None for other text.

    An array that begins with an object holds records. So does any JSON in a file that is named on
    the command line; in a folder, where files of settings may lie, an object with the keys does.

    Raises:
        UserError: JSON that is damaged, or records without the keys.
    """
    is_object = _OBJECT.match(content)
    is_certain = bool(_OBJECTS.match(content))
    if is_named:
        is_certain |= bool(is_object or (_JSON_NAME.search(path.name) and content.strip()))
    if not is_certain and not is_object:
        return None
    try:
        found = parse_json(content, str(path))
    except UserError as error:
        if is_certain or "Extra data" in str(error):
            raise
        return None
    if not is_certain and not all(key in found for key in keys):
        return None
    if isinstance(found, list):
        return [_texts_of(entry, keys, f"{path}: entry {n}") for n, entry in enumerate(found, 1)]
    return [_texts_of(found, keys, str(path))]


def _texts_of(record: object, keys: Sequence[str], place: str) -> tuple[str, ...]:
    return tuple(text_of(record, key, place) for key in keys)


def text_of(record: Any, key: str, place: str) -> str:
    """Return the string under a key of parsed JSON.

    Raises UserError, naming the place, where there is no such string, or one that is not Unicode.
    """
    if not isinstance(record, dict):
        raise UserError(f"{place}: a JSON object is expected, not {type(record).__name__}")
    if key not in record:
        there = textwrap.shorten(", ".join(record), 200, placeholder=" ...")
        raise UserError(f"{place}: key {key!r} is missing; there are {there}")
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f"{place}: key {key!r} must hold a string, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{place}: key {key!r} holds a lone surrogate (\\ud800-\\udfff)") from None
    return text
