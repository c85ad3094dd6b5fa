"""Text of a command's input: documents of files, which are JSON records or text by their content.

Files may be compressed with gzip, Zstandard, bzip2 or xz, whatever their names.
"""

import argparse
import fnmatch
import json
import lzma
import os
import re
import stat
import textwrap
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_lowbit.data.dataset import is_of_dataset
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.folders import reading, reason
from megatron_lowbit.json_files import parse_json

TEMPORARY = ".preprocess."
"""Start of the names of folders with files that ``lowbit-preprocess`` is writing."""
DEFAULT_KEYS = ("text",)
"""Keys of JSON records that hold text, unless others are given."""
LONGEST_PIECE = 1 << 14
"""Most characters of a document that a long text file is split into."""
_BORDERS = ("\n\n", "\r\n\r\n", "\n", " ")
"""Ends of a piece, the best first: of a paragraph, of a line, of a word."""
_MOST_BYTES = 1 << 30
"""Limit of a line, and of a compressed text: a small file may decompress to more than memory."""
_COMPRESSED = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "bz2": re.compile(rb"BZh[1-9]1AY&SY"),
    "lzma": re.compile(rb"\xfd7zXZ\0"),
    # A frame, or the frame without data that pzstd writes first.
    "backports.zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
"""Modules that decompress, by the first bytes of their files."""
_LINES_NAME = re.compile(r"\.(jsonl|ndjson|jsonlines)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_JSON_NAME = re.compile(r"\.json(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_OBJECT = re.compile(rb'(\xef\xbb\xbf)?\s*\{\s*["}]')
_OBJECTS = re.compile(rb'(\xef\xbb\xbf)?\s*\[\s*\{\s*["}]')


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments by which the tools choose their text."""
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH",
        help="files of text or JSON records, also compressed, or folders of them",
    )  # fmt: skip
    parser.add_argument(
        "--json-keys", nargs="+", metavar="KEY",
        help="keys of a JSON record that hold text (default: text)",
    )  # fmt: skip
    parser.add_argument(
        "--pattern", default="*", metavar="GLOB",
        help="file names to take from folders (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--exclude", nargs="+", default=[], metavar="NAME",
        help="file and folder names to ignore, e.g. tests site-packages",
    )  # fmt: skip


class Document(NamedTuple):
    """One document: a text for each JSON key, and its share of the bytes of its file."""

    texts: tuple[str, ...]
    source_bytes: float


class Corpus:
    """Text that the arguments of :func:`add_corpus_arguments` choose.

    Within folders ``pattern`` filters file names, ``exclude`` drops every path with one of these
    names as a component, and the files of ``tokenizer`` are no text. Raises UserError for a missing
    input, a file or a key that is given twice, filters without a folder, or if nothing is left.

    Attributes:
        files: the inputs in order: a file as it is, a folder's files sorted.
        skipped: files of folders that :meth:`documents` has found not to be UTF-8.
        split: files that :meth:`documents` has split into several documents.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        json_keys: Sequence[str] | None,
        pattern: str,
        exclude: Sequence[str],
        tokenizer: Sequence[Path] = (),
    ) -> None:
        self._inputs, self._json_keys = list(map(Path, inputs)), json_keys
        ignored = {file.name: file for file in tokenizer if file.is_file()}
        self.files = [
            file
            for entry in self._inputs
            for file in _files_of(entry, pattern, frozenset(exclude))
            if file == entry or file.name not in ignored or not file.samefile(ignored[file.name])
        ]
        names = ", ".join(map(str, inputs))
        filters = f"--pattern {pattern!r} and --exclude"
        is_filtered = pattern != "*" or bool(exclude)
        has_folder = any(map(Path.is_dir, self._inputs))
        require(has_folder or not is_filtered, f"{filters} need a folder as --input, not {names}")
        require(bool(self.files), f"--input {names}: no file matches {filters}")
        path, count = Counter(map(os.path.abspath, self.files)).most_common(1)[0]
        require(count == 1, f"--input {names}: {path} is among them {count} times; give it once")
        keys = json_keys or ()
        require(len(set(keys)) == len(keys), f"--json-keys {' '.join(keys)}: each key once")
        self.skipped: list[Path] = []
        self.split: list[Path] = []

    def documents(self) -> Iterator[Document]:
        """Yield the documents: each JSON record, any other file as a whole.

        A long text file, or one that is the only file, is split: Megatron-LM divides a dataset into
        parts for training and validation by whole documents.

        Raises UserError for a record that is malformed or lacks a key, for a file of the command
        line without UTF-8 text, and for text where JSON keys are given.
        """
        for path in self.files:
            with _open(path) as (stored, unpacked):
                if _holds_lines(path, unpacked):
                    yield from _lines(path, stored, unpacked, self._json_keys or DEFAULT_KEYS)
                else:
                    # Only what is decompressed may be much larger than its file.
                    limit = -1 if unpacked is stored else _MOST_BYTES + 1
                    content = unpacked.read(limit)
                    require(
                        len(content) != limit,
                        f"{path}: decompresses to a text of more than {_MOST_BYTES >> 30} GiB; "
                        "decompress it",
                    )
                    yield from self._documents_of(path, content)

    def _documents_of(self, path: Path, content: bytes) -> Iterator[Document]:
        """Yield the documents of a file that is read as a whole."""
        is_named, size, text = path in self._inputs, path.stat().st_size, None
        if b"\0" not in content:  # as archives and other binary files have it
            with suppress(UnicodeDecodeError):
                text = content.decode("utf-8")
        if text is None:
            require(not is_named, f"--input {path}: not UTF-8 text, or contains NUL bytes")
            self.skipped.append(path)
            return
        records = _records(path, content, self._json_keys or DEFAULT_KEYS, is_named)
        if records is not None:
            yield from (Document(texts, size / len(records)) for texts in records)
            return
        if not text:
            return
        require(
            self._json_keys is None,
            f"{path}: holds text without JSON records, to which --json-keys "
            f"{' '.join(self._json_keys or ())} does not apply",
        )
        if len(self.files) > 1 and len(content) <= 1 << 18:
            yield Document((text,), size)
            return
        if len(text) > LONGEST_PIECE:
            self.split.append(path)
        for piece in _split(text):
            yield Document((piece,), size * len(piece) / len(text))

    def report_split(self) -> None:
        """Print which files were split into documents, if any."""
        if self.split:
            names = f"{len(self.split)} files, the first " if len(self.split) > 1 else ""
            say(
                "split after paragraphs into documents of at most "
                f"{LONGEST_PIECE:,} characters: {names}{self.split[0]}"
            )

    def report_skipped(self) -> None:
        """Print how many files of the input folders were ignored, if any."""
        if self.skipped:
            count, first = len(self.skipped), self.skipped[0]
            say(f"skipped as not UTF-8 text: {count} files, the first {first}")


def _files_of(entry: Path, pattern: str, exclude: frozenset[str]) -> list[Path]:
    """Return an input that is a file, or the files of a folder in their order.

    Datasets are no text: the output of an earlier command may lie in the folder.
    """
    try:
        mode = entry.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"--input {entry}: no such file or folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--input {entry}: {reason(error)}") from None
    if stat.S_ISREG(mode):
        return [entry]
    require(stat.S_ISDIR(mode), f"--input {entry}: neither a file nor a folder")
    files: list[Path] = []
    for root, folders, names in os.walk(entry, onerror=_refuse):
        folders[:] = [n for n in folders if n not in exclude and not n.startswith(TEMPORARY)]
        link = next((path for path in map(Path(root).joinpath, folders) if path.is_symlink()), None)
        advice = "give it to --input, or its name to --exclude"
        require(link is None, f"--input {entry}: {link} is a link to a folder; {advice}")
        chosen = (name for name in fnmatch.filter(names, pattern) if name not in exclude)
        paths = (Path(root, name) for name in chosen)
        files += (path for path in paths if path.is_file() and not is_of_dataset(path))
    return sorted(files)


def _refuse(error: OSError) -> None:
    raise UserError(f"--input {error.filename}: {reason(error)}") from error


def _split(text: str) -> Iterator[str]:
    """Yield a text in pieces, each as long as possible and ending at the best border within it."""
    start = 0
    while len(text) - start > LONGEST_PIECE:
        piece = text[start : start + LONGEST_PIECE]
        border = next((border for border in _BORDERS if border in piece), "")
        end = start + piece.rfind(border) + len(border)  # without a border, the piece's own end
        yield text[start:end]
        start = end
    yield text[start:]


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file as it is stored, and the same file decompressed."""
    damage: tuple[type[Exception], ...] = (EOFError, lzma.LZMAError, zlib.error)
    try:
        with reading(path), path.open("rb") as stored, ExitStack() as stack:
            head = stored.read(16)
            stored.seek(0)
            name = next((name for name, magic in _COMPRESSED.items() if magic.match(head)), None)
            unpacked: BinaryIO = stored
            if name is not None:
                try:
                    module = import_module(name)
                except ImportError:
                    hint = f"decompress it, or install its reader: pip install {name}"
                    raise UserError(f"{path}: {hint}") from None
                damage += (getattr(module, "ZstdError", EOFError),)
                unpacked = stack.enter_context(module.open(stored))
            yield stored, unpacked
    except damage as error:
        raise UserError(f"{path}: a damaged compressed file ({error})") from None


def _holds_lines(path: Path, unpacked: BinaryIO) -> bool:
    """Return True if a file has one JSON object per line, by its name or its first two lines."""
    if _LINES_NAME.search(path.name):
        return True
    lines = iter(partial(unpacked.readline, _MOST_BYTES), b"")
    first, second = [*islice((line for line in lines if line.strip()), 2), b"", b""][:2]
    unpacked.seek(0)
    if not (second and _OBJECT.match(first)):
        return False
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(first), dict)
    return bool(_OBJECT.match(second))


def _lines(
    path: Path, stored: BinaryIO, unpacked: BinaryIO, keys: Sequence[str]
) -> Iterator[Document]:
    """Yield a document for each line that is not empty; errors name file:line."""
    read = 0
    for source, line in numbered_lines(path, unpacked):
        if line.strip():
            texts = _texts_of(parse_json(line, source), keys, source)
            position = stored.tell()
            yield Document(texts, position - read)
            read = position


def numbered_lines(path: str | Path, stream: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Yield file:line and content of each line; raise UserError for one too long for memory."""
    for number, line in enumerate(iter(partial(stream.readline, _MOST_BYTES), b""), 1):
        require(len(line) < _MOST_BYTES, f"{path}:{number}: longer than {_MOST_BYTES >> 30} GiB")
        yield f"{path}:{number}", line


def _records(
    path: Path, content: bytes, keys: Sequence[str], is_named: bool
) -> list[tuple[str, ...]] | None:
    """Return the texts of each record of a content that is JSON as a whole; None for other text.

    An array that begins with an object holds records. So does any JSON in a file that is named on
    the command line; in a folder, where files of settings may lie, an object with the keys does.
    """
    is_object = bool(_OBJECT.match(content))
    is_certain = bool(_OBJECTS.match(content))
    if is_named:
        is_certain |= is_object or bool(_JSON_NAME.search(path.name) and content.strip())
    if not is_certain and not is_object:
        return None
    try:
        parsed = parse_json(content, str(path))
    except UserError as error:
        if is_certain or "Extra data" in str(error):
            raise
        return None
    if not is_certain and not all(key in parsed for key in keys):
        return None
    if isinstance(parsed, list):
        return [_texts_of(entry, keys, f"{path}: entry {n}") for n, entry in enumerate(parsed, 1)]
    return [_texts_of(parsed, keys, str(path))]


def _texts_of(record: object, keys: Sequence[str], source: str) -> tuple[str, ...]:
    return tuple(text_of(record, key, source) for key in keys)


def text_of(record: Any, key: str, source: str) -> str:
    """Return the string under a key of parsed JSON.

    Raises UserError, naming the place, where there is no such string, or one that is not Unicode.
    """
    if not isinstance(record, dict):
        raise UserError(f"{source}: a JSON object is expected, not {type(record).__name__}")
    if key not in record:
        there = textwrap.shorten(", ".join(record), 200, placeholder=" ...")
        raise UserError(f"{source}: key {key!r} is missing; there are {there}")
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f"{source}: key {key!r} must hold a string, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{source}: key {key!r} holds a lone surrogate (\\ud800-\\udfff)") from None
    return text
