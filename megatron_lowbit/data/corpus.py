"""Tokenize text into a Megatron indexed dataset: PREFIX.bin, PREFIX.idx and PREFIX.json.

Each JSON record is a document: an object per line, or the entries of an array. Any other text file
is one document; the only file, or one of more than 256 KiB, is split after paragraphs into pieces
of at most 16,384 characters, so that --split can divide it for training and validation. Content
decides, not a file's name; it may be compressed with gzip, Zstandard, bzip2 or xz. With several
--json-keys each key becomes a dataset of its own, PREFIX_KEY.

Example: lowbit-preprocess --input corpus.jsonl --tokenizer-model tokenizer/ --output-prefix corpus
"""

import argparse
import fnmatch
import os
import signal
import stat
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import numpy as np

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.data import dataset_writer
from megatron_lowbit.data.documents import (
    Document,
    OpenFile,
    holds_lines,
    open_file,
    read_content,
    read_lines,
    read_records,
    text_in,
)
from megatron_lowbit.data.tokenizer import Tokenizer, ids_beyond_model, load_tokenizer
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.folders import reason
from megatron_lowbit.storage.lock import delete_abandoned

_BATCH_DOCUMENTS = 64
_BATCH_BYTES = 1 << 20
_WORKERS_PER_CPU = 8
_LONG_FILE_BYTES = 1 << 18
DEFAULT_KEYS = ("text",)
"""Keys of JSON records that hold text, unless others are given."""
LONGEST_PIECE = 1 << 14
"""Most characters of a document that a long text file is split into."""
_BORDERS = ("\n\n", "\r\n\r\n", "\n", " ")
"""Ends of a piece, the best first: of a paragraph, of a line, of a word."""


def main(argv: list[str] | None = None) -> None:
    """Tokenize what the command line names."""
    parser = command_parser(description=__doc__)
    add_corpus_arguments(parser)
    parser.add_argument(
        "--tokenizer-model", required=True, metavar="DIR", help="folder with tokenizer.json"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX",
        help="path of the dataset without suffix, as --data-path takes it",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that tokenize"
    )
    parser.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=True,
        help="end each document with the end-of-document token (default: on)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    preprocess(
        args.input, args.tokenizer_model, args.output_prefix, json_keys=args.json_keys,
        pattern=args.pattern, exclude=args.exclude, workers=args.workers,
        append_eod=args.append_eod,
    )  # fmt: skip


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
        help="file and folder names to leave out, e.g. tests site-packages",
    )  # fmt: skip


class Corpus:
    """Text that the arguments of :func:`add_corpus_arguments` choose.

    Within folders ``pattern`` filters file names and ``exclude`` drops every path with one of
    these names as a component. Raises UserError for a missing input, or if nothing is left.

    Attributes:
        files: the inputs in order: a file as it is, a folder's files sorted.
        skipped: those of folders that :meth:`documents` found not to be UTF-8.
        split: those that :meth:`documents` split into several documents.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        json_keys: Sequence[str] | None,
        pattern: str,
        exclude: Sequence[str],
    ) -> None:
        self._inputs, self._json_keys = list(map(Path, inputs)), json_keys
        self.files = _collect_files(self._inputs, pattern, exclude)
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
            with open_file(path) as file:
                if holds_lines(file):
                    yield from read_lines(file, self._json_keys or DEFAULT_KEYS)
                else:
                    yield from self._documents_of(file)

    def _documents_of(self, file: OpenFile) -> Iterator[Document]:
        """Yield the documents of a file that is read as a whole."""
        path, content, is_named = file.path, read_content(file), file.path in self._inputs
        text = text_in(content)
        if text is None:
            require(not is_named, f"--input {path}: not UTF-8 text")
            self.skipped.append(path)
            return
        size = path.stat().st_size
        records = read_records(path, content, self._json_keys or DEFAULT_KEYS, is_named)
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
        if len(self.files) > 1 and len(content) <= _LONG_FILE_BYTES:
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
        """Print how many files of the input folders were left out, if any."""
        if self.skipped:
            say(f"skipped as not UTF-8: {len(self.skipped)} files, the first {self.skipped[0]}")


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


def _collect_files(inputs: Sequence[Path], pattern: str, exclude: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for entry in inputs:
        try:
            mode = entry.stat().st_mode
        except FileNotFoundError:
            raise UserError(f"--input {entry}: no such file or folder") from None
        except (OSError, ValueError) as error:
            raise UserError(f"--input {entry}: {reason(error)}") from None
        if stat.S_ISREG(mode):
            files.append(entry)
        elif stat.S_ISDIR(mode):
            files.extend(_folder_files(entry, pattern, frozenset(exclude)))
        else:
            raise UserError(f"--input {entry}: neither a file nor a folder")
    if not files:
        names = ", ".join(map(str, inputs))
        raise UserError(f"--input {names}: no file matches --pattern {pattern!r} and --exclude")
    return files


def _folder_files(folder: Path, pattern: str, exclude: frozenset[str]) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in exclude]
        chosen = (name for name in fnmatch.filter(names, pattern) if name not in exclude)
        found.extend(path for path in (Path(root, name) for name in chosen) if path.is_file())
    return sorted(found)


def preprocess(
    inputs: Sequence[str | Path],
    tokenizer_model: str,
    output_prefix: str,
    *,
    json_keys: Sequence[str] | None = None,
    pattern: str = "*",
    exclude: Sequence[str] = (),
    workers: int = 1,
    append_eod: bool = True,
) -> list[dataset_writer.DatasetSummary]:
    """Tokenize ``inputs`` into PREFIX.bin, PREFIX.idx and PREFIX.json (several keys: PREFIX_KEY).

    Token ids are uint16 where the vocabulary fits, else int32; empty documents are left out. The
    files do not depend on ``workers``. They appear only when complete. Raises UserError for bad
    arguments or input, and if there is no document.
    """
    keys = json_keys or DEFAULT_KEYS
    most = _WORKERS_PER_CPU * (os.cpu_count() or 1)
    if not 1 <= workers <= most:
        raise UserError(f"--workers {workers}: at least 1 and at most {most} on this machine")
    require(len(set(keys)) == len(keys), f"--json-keys {' '.join(keys)}: each key once")
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_model, None)
    corpus = Corpus(inputs, json_keys, pattern, exclude)
    prefixes = [output_prefix] if len(keys) == 1 else [f"{output_prefix}_{k}" for k in keys]
    dataset_writer.check_targets(output_prefix, prefixes)
    dtype = dataset_writer.indexed_dataset().DType.optimal_dtype(tokenizer.vocab_size)
    encode = partial(_encode_batch, tokenizer, dtype, append_eod)
    temporary = dataset_writer.temporary_path(output_prefix)
    encoded = _encode_documents(corpus.documents(), encode, workers, temporary)
    total_bytes = sum(file.stat().st_size for file in corpus.files)
    summaries = dataset_writer.write_datasets(
        encoded, dtype, output_prefix, prefixes, tokenizer, total_bytes
    )
    for summary in summaries:
        say(
            f"{summary.prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens, "
            f"{summary.text_bytes / summary.tokens:.2f} bytes per token"
        )
        if line := ids_beyond_model(Path(tokenizer_model), summary.largest_id):
            say(line)
    special = summaries[0].special_tokens
    if special:
        counts = ", ".join(f"{token} {count:,}" for token, count in special.most_common())
        say(f"special tokens written in the texts, which training reads as such: {counts}")
    corpus.report_split()
    corpus.report_skipped()
    return summaries


Encoder = Callable[[list[Document]], list[dataset_writer.EncodedDocument]]


def _encode_batch(
    tokenizer: Tokenizer, dtype: type[np.integer], append_eod: bool, batch: list[Document]
) -> list[dataset_writer.EncodedDocument]:
    encoded = []
    end = [tokenizer.eod] if append_eod else []
    for document in batch:
        ids = [tokenizer.tokenize(text) for text in document.texts]
        tokens = [np.array(i + end if i else i, dtype=dtype) for i in ids]
        text_bytes = [len(text.encode("utf-8")) for text in document.texts]
        special = _written_specials(tokenizer, document.texts, ids)
        encoded.append(
            dataset_writer.EncodedDocument(tokens, text_bytes, document.source_bytes, special)
        )
    return encoded


def _written_specials(
    tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[list[int]]
) -> Counter[str]:
    """Count the special tokens that texts spell out, not those that stand for unknown text."""
    found = Counter()
    for text, own in zip(texts, ids, strict=True):
        for number in tokenizer.special_tokens.keys() & own:
            token = tokenizer.special_tokens[number]
            found[token] += own.count(number) if token in text else 0
    return +found


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document.texts))
        if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_worker_encode: Encoder | None = None


def _start_worker(encode: Encoder, temporary: Path) -> None:
    """Prepare this process, which ends with its parent and then deletes the parent's files."""
    global _worker_encode
    _worker_encode = encode
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def end_with_parent() -> None:
        parent_process().join()
        with suppress(UserError, OSError):
            delete_abandoned(temporary, "")
        os._exit(1)

    Thread(target=end_with_parent, daemon=True).start()


def _encode_in_worker(batch: list[Document]) -> list[dataset_writer.EncodedDocument]:
    assert _worker_encode is not None
    return _worker_encode(batch)


def _start_pool(encode: Encoder, workers: int, temporary: Path) -> ProcessPoolExecutor:
    # fork: workers inherit the loaded tokenizer, and import nothing again.
    pool = ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (encode, temporary))
    # Ctrl-C reaches the whole process group, but only the parent must act on it: workers are born
    # with it blocked. A signal that comes while forking would be lost, for Python's hooks around a
    # fork swallow exceptions, and other threads take it in spite of the mask: it is raised after.
    came: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, _: came.append(number)) for number in signals]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    pool.submit(int)  # the first task starts the processes
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in zip(signals, handlers, strict=True):
        signal.signal(number, handler)
    try:
        for number in came:
            signal.raise_signal(number)
    except (KeyboardInterrupt, SystemExit):
        pool.shutdown(cancel_futures=True)
        raise
    return pool


def _encode_documents(
    documents: Iterator[Document], encode: Encoder, workers: int, temporary: Path
) -> Generator[dataset_writer.EncodedDocument, None, None]:
    """Encode in input order; only a few batches are in memory at a time."""
    if workers == 1:
        for batch in _batches(documents):
            yield from encode(batch)
        return
    pool = _start_pool(encode, workers, temporary)
    try:
        window = deque()
        for batch in _batches(documents):
            window.append(pool.submit(_encode_in_worker, batch))
            if len(window) >= 4 * workers:
                yield from window.popleft().result()
        while window:
            yield from window.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"--workers {workers}: the system ended one, which may have needed more memory than "
            "there is; give fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
