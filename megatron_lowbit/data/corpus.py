"""From files of text to a Megatron indexed dataset: collect, read, tokenize, write."""

import argparse
import fnmatch
import json
import os
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_lowbit.data.digest import data_digest
from megatron_lowbit.data.tokenizer import Tokenizer, load_tokenizer
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import parse_json

_BATCH_DOCUMENTS = 64
_BATCH_BYTES = 1 << 20
_PLAIN_LINE_SECONDS = 10.0


class Document(NamedTuple):
    """One document: a text for each JSON key, and the bytes it takes in its file."""

    texts: tuple[str, ...]
    source_bytes: int


class EncodedDocument(NamedTuple):
    """Token ids for each key (1-D, the dataset's dtype; empty for an empty text), UTF-8 bytes."""

    tokens: list[np.ndarray]
    text_bytes: list[int]
    source_bytes: int


@dataclass
class DatasetSummary:
    """What was written under one prefix."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments by which the tools choose their text."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files, .jsonl files (a document a line), or folders of them",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of a .jsonl record that hold text (default: text)",
    )
    parser.add_argument(
        "--pattern",
        default="*",
        metavar="GLOB",
        help="file names to take from folders (default: all)",
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="NAME",
        help="file and folder names to leave out, e.g. tests site-packages",
    )


def collect_files(
    inputs: Sequence[str | Path], pattern: str = "*", exclude: Sequence[str] = ()
) -> list[Path]:
    """The files of ``inputs`` in order: a file as it is, a folder's files sorted.

    Within folders ``pattern`` filters file names and ``exclude`` drops every path with one of
    these names as a component. Raises UserError for a missing input, or if nothing is left.
    """
    files: list[Path] = []
    for entry in map(Path, inputs):
        if entry.is_file():
            files.append(entry)
        elif entry.is_dir():
            files.extend(_folder_files(entry, pattern, frozenset(exclude)))
        else:
            raise UserError(f"--input {entry}: no such file or folder")
    if not files:
        names = ", ".join(map(str, inputs))
        raise UserError(f"--input {names}: no file matches --pattern {pattern!r} and --exclude")
    return files


def _folder_files(folder: Path, pattern: str, exclude: frozenset[str]) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in exclude]
        kept = (name for name in fnmatch.filter(names, pattern) if name not in exclude)
        found.extend(path for path in (Path(root, name) for name in kept) if path.is_file())
    return sorted(found)


def read_documents(
    files: Sequence[Path],
    json_keys: Sequence[str] = ("text",),
    *,
    required: Sequence[Path] = (),
    skipped: list[Path] | None = None,
) -> Iterator[Document]:
    """Yield the documents of ``files``: each line of a ``.jsonl``, any other file as a whole.

    A text file that is not UTF-8 is appended to ``skipped`` unless it is in ``required`` (files
    the user named). Raises UserError, naming file:line, for a malformed line or a missing key.
    """
    for path in files:
        try:
            if path.suffix == ".jsonl":
                yield from _read_json_lines(path, json_keys)
                continue
            if len(json_keys) > 1:
                raise UserError(f"{path}: several --json-keys need .jsonl files")
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        try:
            yield Document((content.decode("utf-8"),), len(content))
        except UnicodeDecodeError:
            if path in required:
                raise UserError(f"--input {path}: not UTF-8 text") from None
            if skipped is not None:
                skipped.append(path)


def _read_json_lines(path: Path, json_keys: Sequence[str]) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = parse_json(line, f"{path}:{number}")
            texts = tuple(_text_of(record, key, f"{path}:{number}") for key in json_keys)
            yield Document(texts, len(line))


def _text_of(record: object, key: str, place: str) -> str:
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


def report_skipped(skipped: Sequence[Path]) -> None:
    """Say how many files of the input folders were left out, if any."""
    if skipped:
        print(f"skipped as not UTF-8: {len(skipped)} files, the first {skipped[0]}")


def preprocess(
    inputs: Sequence[str | Path],
    tokenizer_model: str,
    output_prefix: str,
    *,
    json_keys: Sequence[str] = ("text",),
    pattern: str = "*",
    exclude: Sequence[str] = (),
    workers: int = 1,
    append_eod: bool = True,
) -> list[DatasetSummary]:
    """Tokenize ``inputs`` into PREFIX.bin, PREFIX.idx and PREFIX.json (several keys: PREFIX_KEY).

    Token ids are uint16 where the vocabulary fits, else int32; empty documents are left out. The
    files do not depend on ``workers``. They appear only when complete. Raises UserError for bad
    arguments or input, and if there is no document.
    """
    if workers < 1:
        raise UserError(f"--workers {workers}: at least 1")
    if len(set(json_keys)) != len(json_keys):
        raise UserError(f"--json-keys {' '.join(json_keys)}: each key once")
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_model, None)
    files = collect_files(inputs, pattern, exclude)
    skipped: list[Path] = []
    documents = read_documents(
        files, json_keys, required=[Path(entry) for entry in inputs], skipped=skipped
    )
    prefixes = (
        [output_prefix] if len(json_keys) == 1 else [f"{output_prefix}_{k}" for k in json_keys]
    )
    dtype = _indexed_dataset().DType.optimal_dtype(tokenizer.vocab_size)
    encode = partial(_encode_batch, tokenizer, dtype, append_eod)
    encoded = _encode_documents(documents, encode, workers)
    total_bytes = sum(file.stat().st_size for file in files)
    summaries = _write_datasets(encoded, dtype, prefixes, tokenizer, total_bytes)
    for summary in summaries:
        print(
            f"{summary.prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens, "
            f"{summary.text_bytes / summary.tokens:.2f} bytes per token"
        )
    report_skipped(skipped)
    return summaries


def _indexed_dataset() -> ModuleType:
    """megatron-core's module. Imported late, for it takes seconds; with warnings off, for they
    are about packages that only training uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron_lowbit.megatron  # noqa: F401  must come first

        # isort: split
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


Encoder = Callable[[list[Document]], list[EncodedDocument]]


def _encode_batch(
    tokenizer: Tokenizer, dtype: type[np.integer], append_eod: bool, batch: list[Document]
) -> list[EncodedDocument]:
    encoded = []
    end = [tokenizer.eod] if append_eod else []
    for document in batch:
        ids = [tokenizer.tokenize(text) for text in document.texts]
        tokens = [np.array(i + end if i else i, dtype=dtype) for i in ids]
        text_bytes = [len(text.encode("utf-8")) for text in document.texts]
        encoded.append(EncodedDocument(tokens, text_bytes, document.source_bytes))
    return encoded


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.source_bytes
        if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_worker_encode: Encoder | None = None


def _start_worker(encode: Encoder) -> None:
    global _worker_encode
    _worker_encode = encode


def _encode_in_worker(batch: list[Document]) -> list[EncodedDocument]:
    assert _worker_encode is not None
    return _worker_encode(batch)


def _start_pool(encode: Encoder, workers: int) -> ProcessPoolExecutor:
    # fork: workers inherit the loaded tokenizer, and import nothing anew.
    pool = ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (encode,))
    # Ctrl-C reaches the whole process group, but the parent alone must act on it: workers are born
    # with it blocked. One that comes while forking would be lost, for Python's hooks around a fork
    # swallow exceptions, and other threads take it in spite of the mask: it is raised after.
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pool.submit(int)  # the first task starts the processes
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGINT, handler)
    try:
        if came:
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pool.shutdown(cancel_futures=True)
        raise
    return pool


def _encode_documents(
    documents: Iterator[Document], encode: Encoder, workers: int
) -> Generator[EncodedDocument, None, None]:
    """Encode in input order; only a few batches are in memory at a time."""
    if workers == 1:
        for batch in _batches(documents):
            yield from encode(batch)
        return
    pool = _start_pool(encode, workers)
    try:
        window = deque()
        for batch in _batches(documents):
            window.append(pool.submit(_encode_in_worker, batch))
            if len(window) >= 4 * workers:
                yield from window.popleft().result()
        while window:
            yield from window.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _write_datasets(
    encoded: Generator[EncodedDocument, None, None],
    dtype: type[np.integer],
    prefixes: list[str],
    tokenizer: Tokenizer,
    total_bytes: int,
) -> list[DatasetSummary]:
    """Write one indexed dataset for each prefix under temporary names, then rename them all."""
    folder = Path(prefixes[0]).parent
    folder.mkdir(parents=True, exist_ok=True)
    summaries = [DatasetSummary(prefix) for prefix in prefixes]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".preprocess.") as temporary:
        paths = [str(Path(temporary, Path(prefix).name)) for prefix in prefixes]
        builders = [
            _indexed_dataset().IndexedDatasetBuilder(f"{path}.bin", dtype=dtype) for path in paths
        ]
        # closing: stop the workers before the folder goes, whatever happens.
        with closing(encoded), _progress(total_bytes) as advance:
            for document in encoded:
                for builder, summary, tokens, size in zip(
                    builders, summaries, document.tokens, document.text_bytes, strict=True
                ):
                    if tokens.size:
                        builder.add_document(tokens, [tokens.size])
                        summary.documents += 1
                        summary.tokens += tokens.size
                        summary.text_bytes += size
                advance(document.source_bytes, summaries[0])
        for builder, summary, path in zip(builders, summaries, paths, strict=True):
            builder.finalize(f"{path}.idx")
            if not summary.documents:
                raise UserError(f"{summary.prefix}: --input holds no document with text")
            _write_sidecar(Path(f"{path}.json"), tokenizer, summary)
        for path, prefix in zip(paths, prefixes, strict=True):
            for suffix in (".bin", ".json", ".idx"):
                os.replace(path + suffix, prefix + suffix)
    return summaries


def _write_sidecar(path: Path, tokenizer: Tokenizer, summary: DatasetSummary) -> None:
    content = {
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "documents": summary.documents,
        "tokens": summary.tokens,
        "data_sha256": data_digest(path.with_suffix(".bin")),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int, DatasetSummary], None]]:
    """A bar on a terminal, else a line every few seconds. Gives advance(source bytes, counts)."""
    if sys.stdout.isatty():
        columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
        counts = TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens")
        with Progress(*columns, counts) as bar:
            task = bar.add_task("", total=total_bytes, documents=0, tokens=0)

            def advance_bar(size: int, summary: DatasetSummary) -> None:
                bar.update(task, advance=size, documents=summary.documents, tokens=summary.tokens)

            yield advance_bar
        return
    done, last_line = 0, time.monotonic()

    def advance_lines(size: int, summary: DatasetSummary) -> None:
        nonlocal done, last_line
        done += size
        if time.monotonic() - last_line >= _PLAIN_LINE_SECONDS:
            last_line = time.monotonic()
            share = 100 * done / max(total_bytes, 1)
            print(
                f"{share:.0f} %: {summary.documents:,} documents, {summary.tokens:,} tokens",
                flush=True,
            )

    yield advance_lines
