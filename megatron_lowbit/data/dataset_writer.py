"""Writing of a Megatron indexed dataset and its sidecar."""

import hashlib
import json
import os
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_lowbit.data.tokenizer import Tokenizer
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.folders import check_file, check_folder, replace_text, writing
from megatron_lowbit.json_files import read_object
from megatron_lowbit.storage.lock import delete_abandoned, temporary_folder

_PLAIN_LINE_SECONDS = 10.0
_SUFFIXES = (".json", ".bin", ".idx")
"""In the order of their renaming: the sidecar tells whose the other files are."""
_DIGEST = "data_sha256"
_TEMPORARY = ".preprocess."
_ARGUMENT = "--output-prefix"


class EncodedDocument(NamedTuple):
    """Token ids for each key (1-D, the dataset's dtype; empty for an empty text), UTF-8 bytes.

    ``special_tokens`` counts those that are written in the texts.
    """

    tokens: list[np.ndarray]
    text_bytes: list[int]
    source_bytes: float
    special_tokens: Counter[str]


@dataclass
class DatasetSummary:
    """Summary of what was written under one prefix."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    largest_id: int = 0
    special_tokens: Counter[str] = field(default_factory=Counter)


def check_targets(output_prefix: str, prefixes: list[str]) -> None:
    """Check before the work that every file can be put in its place after it."""
    folder = Path(output_prefix).parent
    if output_prefix.endswith(os.sep):
        raise UserError(f"{_ARGUMENT} {output_prefix}: a name of files, not a folder")
    check_folder(_ARGUMENT, folder)
    for prefix in prefixes:
        is_beside = Path(prefix).parent == folder
        require(is_beside, f"--json-keys: {prefix} is no name for a file beside {output_prefix}")
        files = [Path(prefix + suffix) for suffix in _SUFFIXES]
        for file in files:
            check_file(_ARGUMENT, file)
        existing = next((file for file in files if os.path.lexists(file)), None)
        require(
            existing is None or _is_sidecar(files[0]),
            f"{_ARGUMENT} {prefix}: {existing} exists and is not of lowbit-preprocess; give "
            "another prefix",
        )


def _is_sidecar(path: Path) -> bool:
    with suppress(UserError):
        return _DIGEST in read_object(path)
    return False


def temporary_path(output_prefix: str) -> Path:
    """Return the folder that holds a command's files until they are whole."""
    path = Path(output_prefix)
    return path.with_name(f"{_TEMPORARY}{path.name}")


def indexed_dataset() -> ModuleType:
    """Return megatron-core's module.

    It is imported late, for it takes seconds; with warnings off, for they are about packages that
    only training uses.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron_lowbit.cpu_runtime  # noqa: F401  must come first

        # isort: split
        from megatron.core.datasets import indexed_dataset as module
    return module


def write_datasets(
    encoded: Generator[EncodedDocument, None, None],
    dtype: type[np.integer],
    output_prefix: str,
    prefixes: list[str],
    tokenizer: Tokenizer,
    total_bytes: int,
) -> list[DatasetSummary]:
    """Write one indexed dataset for each prefix under temporary names, then rename them all."""
    summaries = [DatasetSummary(prefix) for prefix in prefixes]
    temporary = temporary_path(output_prefix)
    place = f"{_ARGUMENT} {output_prefix}"
    for other in temporary.parent.glob(f"{_TEMPORARY}*"):
        with suppress(UserError):
            delete_abandoned(other, place)
    with writing(_ARGUMENT, output_prefix), temporary_folder(temporary, place):
        paths = [str(temporary / Path(prefix).name) for prefix in prefixes]
        builders = [
            indexed_dataset().IndexedDatasetBuilder(f"{path}.bin", dtype=dtype) for path in paths
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
                        summary.largest_id = max(summary.largest_id, int(tokens.max()))
                summaries[0].special_tokens += document.special_tokens
                advance(document.source_bytes, summaries[0])
        for builder, summary, path in zip(builders, summaries, paths, strict=True):
            builder.finalize(f"{path}.idx")
            if not summary.documents:
                raise UserError(f"{summary.prefix}: --input holds no document with text")
            _write_sidecar(Path(f"{path}.json"), tokenizer, summary)
        for path, prefix in zip(paths, prefixes, strict=True):
            for suffix in _SUFFIXES:
                os.replace(path + suffix, prefix + suffix)
    return summaries


def _write_sidecar(path: Path, tokenizer: Tokenizer, summary: DatasetSummary) -> None:
    content = {
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "documents": summary.documents,
        "tokens": summary.tokens,
        "largest_id": summary.largest_id,
        _DIGEST: data_digest(path.with_suffix(".bin")),
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
            if bar.disable and time.monotonic() - last_line >= _PLAIN_LINE_SECONDS:
                last_line = time.monotonic()
                say(f"{task.percentage:.0f} %: {text}")

        yield advance


_PARTS, _PART_BYTES = 64, 1 << 20


def data_digest(path: Path) -> str:
    """Return the SHA-256 of a file's length and of 64 evenly spaced MiB of it.

    A file of up to 64 MiB is covered whole; a larger one takes no longer.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(struct.pack("<q", size))
    step = max(_PART_BYTES, size // _PARTS)
    with path.open("rb") as stream:
        for offset in range(0, size, step):
            stream.seek(offset)
            digest.update(stream.read(_PART_BYTES))
    return digest.hexdigest()


def dataset_digest(prefix: str) -> str | None:
    """Return a SHA-256 of PREFIX.bin and PREFIX.idx, or of a file PREFIX; None if one is missing.

    Of each file it covers what :func:`data_digest` does.
    """
    whole = Path(prefix)
    paths = [whole] if whole.is_file() else [Path(f"{prefix}{end}") for end in (".bin", ".idx")]
    if not all(path.is_file() for path in paths):
        return None
    return hashlib.sha256("".join(map(data_digest, paths)).encode()).hexdigest()
