"""Tokenize text into an indexed dataset of Megatron-LM: PREFIX.bin, PREFIX.idx and PREFIX.json.

Each JSON record is a document: an object per line, or the entries of an array. Any other text file
is one document; the only file, or one of more than 256 KiB, is split after paragraphs into pieces
of at most 16,384 characters, so that --split can divide it for training and validation. The format
is detected from a file's content, not its name; files may be compressed with gzip, Zstandard, bzip2
or xz. With several --json-keys each key becomes a separate dataset, PREFIX_KEY.

Example: lowbit-preprocess --input corpus.jsonl --tokenizer-model tokenizer/ --output-prefix corpus
"""

import argparse
import json
import os
import signal
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.data.corpus import (
    DEFAULT_KEYS,
    TEMPORARY,
    Corpus,
    Document,
    add_corpus_arguments,
)
from megatron_lowbit.data.dataset import DIGEST, SUFFIXES, data_digest, is_sidecar
from megatron_lowbit.data.tokenizer import (
    TOKENIZER_TYPE,
    Tokenizer,
    ids_beyond_model,
    load_tokenizer,
    tokenizer_files,
)
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.folders import check_file, check_folder, replace_text, writing
from megatron_lowbit.storage.lock import delete_abandoned, temporary_folder

_BATCH_DOCUMENTS = 64
_BATCH_BYTES = 1 << 20
_ARGUMENT = "--output-prefix"


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


@dataclass
class DatasetSummary:
    """Summary of what was written under one prefix."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    largest_id: int = 0
    special_tokens: Counter[str] = field(default_factory=Counter)


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
) -> list[DatasetSummary]:
    """Tokenize ``inputs`` into PREFIX.bin, PREFIX.idx and PREFIX.json (several keys: PREFIX_KEY).

    Token ids are uint16 where the vocabulary fits, else int32; empty documents are ignored. The
    files do not depend on ``workers``. They appear only when complete. Raises UserError for bad
    arguments or input, and if there is no document.
    """
    keys = json_keys or DEFAULT_KEYS
    limit = 8 * (os.cpu_count() or 1)
    is_possible = 1 <= workers <= limit
    require(is_possible, f"--workers {workers}: at least 1 and at most {limit} on this machine")
    tokenizer = load_tokenizer(TOKENIZER_TYPE, tokenizer_model)
    own = tokenizer_files(Path(tokenizer_model))
    corpus = Corpus(inputs, json_keys, pattern, exclude, own)
    prefixes = [output_prefix] if len(keys) == 1 else [f"{output_prefix}_{k}" for k in keys]
    check_targets(output_prefix, prefixes)
    dtype = _indexed_dataset().DType.optimal_dtype(tokenizer.vocab_size)
    encode = partial(_encode_batch, tokenizer, dtype, append_eod)
    encoded = _encode_documents(corpus.documents(), encode, workers, temporary_path(output_prefix))
    total_bytes = sum(file.stat().st_size for file in corpus.files)
    made_with = {"tokenizer_sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
    made_with |= {"eod": tokenizer.eod} if append_eod else {}
    summaries = _write_datasets(encoded, dtype, output_prefix, prefixes, made_with, total_bytes)
    for summary in summaries:
        say(
            f"{summary.prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens, "
            f"{summary.text_bytes / summary.tokens:.2f} bytes per token"
        )
        if line := ids_beyond_model(Path(tokenizer_model), summary.largest_id):
            say(line)
    if special := summaries[0].special_tokens.most_common():
        counts = ", ".join(f"{token} {count:,}" for token, count in special)
        say(f"special tokens written in the texts, which training reads as such: {counts}")
    corpus.report_split()
    corpus.report_skipped()
    return summaries


def check_targets(output_prefix: str, prefixes: list[str]) -> None:
    """Check before the work that every file can be put in its place after it."""
    folder = Path(output_prefix).parent
    is_name = os.path.basename(output_prefix) not in ("", ".", "..")
    require(is_name, f"{_ARGUMENT} {output_prefix}: a name of files, not a folder")
    check_folder(_ARGUMENT, folder)
    for prefix in prefixes:
        is_beside = Path(prefix).parent == folder
        require(is_beside, f"--json-keys: {prefix} is no name for a file next to {output_prefix}")
        files = [Path(prefix + suffix) for suffix in SUFFIXES]
        for file in files:
            check_file(_ARGUMENT, file)
        existing = next((file for file in files if os.path.lexists(file)), None)
        require(
            existing is None or is_sidecar(Path(f"{prefix}.json")),
            f"{_ARGUMENT} {prefix}: {existing} exists and is not of lowbit-preprocess; give "
            "another prefix",
        )


def temporary_path(output_prefix: str) -> Path:
    """Return the folder that holds a command's files until they are whole."""
    path = Path(output_prefix)
    return path.with_name(f"{TEMPORARY}{path.name}")


def _indexed_dataset() -> Any:
    """Return megatron-core's module: late, for its import takes seconds."""
    # Warnings are about packages that only training uses.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron_lowbit.cpu_runtime  # noqa: F401  must come first

        # isort: split
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


class _Encoded(NamedTuple):
    """Token ids for each key (1-D, the dataset's dtype; empty for an empty text), UTF-8 bytes.

    ``special_tokens`` counts those that are written in the texts.
    """

    tokens: list[np.ndarray]
    text_bytes: list[int]
    source_bytes: float
    special_tokens: Counter[str]


_Encoder = Callable[[list[Document]], list[_Encoded]]


def _encode_batch(
    tokenizer: Tokenizer, dtype: type[np.integer], append_eod: bool, batch: list[Document]
) -> list[_Encoded]:
    encoded = []
    end = [tokenizer.eod] if append_eod else []
    for texts, source_bytes in batch:
        ids = [tokenizer.tokenize(text) for text in texts]
        tokens = [np.array(i + end if i else i, dtype=dtype) for i in ids]
        text_bytes = [len(text.encode("utf-8")) for text in texts]
        special = _written_specials(tokenizer, texts, ids)
        encoded.append(_Encoded(tokens, text_bytes, source_bytes, special))
    return encoded


def _written_specials(
    tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[list[int]]
) -> Counter[str]:
    """Count the special tokens that texts spell out, not those that stand for unknown text."""
    counts: Counter[str] = Counter()
    for text, ids_of_text in zip(texts, ids, strict=True):
        for number in tokenizer.special_tokens.keys() & ids_of_text:
            token = tokenizer.special_tokens[number]
            counts[token] += ids_of_text.count(number) if token in text else 0
    return +counts


def _encode_documents(
    documents: Iterator[Document], encode: _Encoder, workers: int, temporary: Path
) -> Generator[_Encoded, None, None]:
    """Encode in input order; only a few batches are in memory at a time."""
    if workers == 1:
        for batch in _batches(documents):
            yield from encode(batch)
        return
    pool = _start_pool(encode, workers, temporary)
    try:
        window: deque[Future[list[_Encoded]]] = deque()
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


def _start_pool(encode: _Encoder, workers: int, temporary: Path) -> ProcessPoolExecutor:
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
        for signal_number in came:
            signal.raise_signal(signal_number)
    except (KeyboardInterrupt, SystemExit):
        pool.shutdown(cancel_futures=True)
        raise
    return pool


_worker_encode: _Encoder | None = None


def _start_worker(encode: _Encoder, temporary: Path) -> None:
    """Prepare this process, which ends with its parent and then deletes the parent's files."""
    global _worker_encode
    _worker_encode = encode
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def end_with_parent() -> None:
        parent: Any = parent_process()
        parent.join()
        with suppress(UserError, OSError):
            delete_abandoned(temporary, "")
        os._exit(1)

    Thread(target=end_with_parent, daemon=True).start()


def _encode_in_worker(batch: list[Document]) -> list[_Encoded]:
    assert _worker_encode is not None
    return _worker_encode(batch)


def _write_datasets(
    encoded: Generator[_Encoded, None, None],
    dtype: type[np.integer],
    output_prefix: str,
    prefixes: list[str],
    made_with: dict[str, Any],
    total_bytes: int,
) -> list[DatasetSummary]:
    """Write one indexed dataset for each prefix under temporary names, then rename them all."""
    summaries = [DatasetSummary(prefix) for prefix in prefixes]
    temporary, argument = temporary_path(output_prefix), f"{_ARGUMENT} {output_prefix}"
    for other in temporary.parent.glob(f"{TEMPORARY}*"):
        with suppress(UserError, OSError):
            delete_abandoned(other, argument)
    with writing(_ARGUMENT, output_prefix), temporary_folder(temporary, argument):
        paths = [str(temporary / Path(prefix).name) for prefix in prefixes]
        new = partial(_indexed_dataset().IndexedDatasetBuilder, dtype=dtype)
        builders = [new(f"{path}.bin") for path in paths]
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
                        summary.largest_id = max(summary.largest_id, int(tokens.max()))
                summaries[0].special_tokens += document.special_tokens
                advance(document.source_bytes, summaries[0])
        for builder, summary, path in zip(builders, summaries, paths, strict=True):
            builder.finalize(f"{path}.idx")
            has_text = summary.documents > 0
            require(has_text, f"{summary.prefix}: --input holds no document with text")
            _write_sidecar(Path(f"{path}.json"), made_with, summary)
        # The sidecar comes first: it tells whose the other files are.
        for path, prefix in zip(paths, prefixes, strict=True):
            for suffix in SUFFIXES:
                os.replace(path + suffix, prefix + suffix)
    return summaries


def _write_sidecar(path: Path, made_with: dict[str, Any], summary: DatasetSummary) -> None:
    content = made_with | {
        "documents": summary.documents,
        "tokens": summary.tokens,
        "largest_id": summary.largest_id,
        DIGEST: data_digest(path.with_suffix(".bin")),
        "index_sha256": data_digest(path.with_suffix(".idx")),
    }
    replace_text(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[float, DatasetSummary], None]]:
    """Show a bar on a terminal, else a line every few seconds; give advance(bytes, counts)."""
    share, counts = TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}")
    columns = (BarColumn(), share, TimeRemainingColumn(), counts)
    last_line = time.monotonic()
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
        bar.add_task("0 documents, 0 tokens", total=total_bytes)
        [task] = bar.tasks

        def advance(size: float, summary: DatasetSummary) -> None:
            nonlocal last_line
            text = f"{summary.documents:,} documents, {summary.tokens:,} tokens"
            bar.update(task.id, advance=size, description=text)
            if bar.disable and time.monotonic() - last_line >= 10:
                last_line = time.monotonic()
                say(f"{task.percentage:.0f} %: {text}")

        yield advance
