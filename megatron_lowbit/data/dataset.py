"""Check indexed datasets before a run trains on them; digests of their data."""

import hashlib
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_lowbit.errors import UserError, require, requiring
from megatron_lowbit.json_files import Entries, read_object, read_small

_CHECKED_TOKENS = 1 << 24
_CHUNK = 1 << 22
_AGAIN = "preprocess the data again"
_MAX_EPOCHS = 100_000
"""Far more than data can be repeated with use; Megatron-LM's index of them takes seconds."""
_DOCUMENT_BYTES = 16
"""Memory that Megatron-LM takes for a document of an epoch: two integers of 64 bits."""

# The .idx file: magic, version, dtype code, counts of sequences and of document boundaries; then
# int32 lengths, int64 byte offsets (a sequence each), int64 boundaries (little endian throughout).
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)
"""Dtypes of tokens by their codes, which begin with 1."""
SUFFIXES = (".json", ".bin", ".idx")
"""Endings of a dataset's files; the .json, which only this project writes, is its sidecar."""
DIGEST = "data_sha256"
"""Key that every sidecar has."""
_MOST_SIDECAR_BYTES = 1 << 16
_PARTS, _PART_BYTES = 64, 1 << 20
"""Number and size of the parts of a file that its digest covers."""


def is_sidecar(path: Path) -> bool:
    """Return True for the PREFIX.json of a dataset."""
    with suppress(UserError, OSError):
        return path.stat().st_size <= _MOST_SIDECAR_BYTES and DIGEST in read_object(path)
    return False


def is_of_dataset(path: Path) -> bool:
    """Return True for the sidecar, the data or the index of a dataset."""
    if path.suffix not in SUFFIXES or is_sidecar(path.with_suffix(".json")):
        return path.suffix in SUFFIXES
    index = path.with_suffix(".idx")
    if path.suffix == ".json" or not index.is_file():
        return False
    with index.open("rb") as stream:
        return stream.read(len(_INDEX_MAGIC)) == _INDEX_MAGIC


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
    file = Path(prefix)
    paths = [file] if file.is_file() else [Path(f"{prefix}{end}") for end in (".bin", ".idx")]
    if not all(path.is_file() for path in paths):
        return None
    return hashlib.sha256("".join(map(data_digest, paths)).encode()).hexdigest()


class DatasetIndex(NamedTuple):
    """Content of PREFIX.idx: token dtype, tokens of each sequence (int32), bytes in PREFIX.bin."""

    dtype: np.dtype
    lengths: np.ndarray
    data_bytes: int


def read_index(prefix: str) -> DatasetIndex:
    """Map PREFIX.idx.

    Raises UserError for a missing, foreign or truncated file, and for lengths, offsets and document
    boundaries that do not describe documents one after another.
    """
    path, start = Path(f"{prefix}.idx"), _INDEX_HEADER.size
    check = requiring(f"--data-path {prefix}")
    for file in (path, Path(f"{prefix}.bin")):
        check(file.is_file(), f"{file} is missing; a dataset is PREFIX.bin and PREFIX.idx")
    with path.open("rb") as stream:
        header = stream.read(start)
    check(header.startswith(_INDEX_MAGIC), f"{path} is not the index of a Megatron dataset")
    check(len(header) == start, f"{path} is truncated; {_AGAIN}")
    _, version, code, sequences, boundaries = _INDEX_HEADER.unpack(header)
    check(
        version == 1 and 1 <= code <= len(_DTYPES),
        f"{path} has version {version} and dtype code {code}; only version 1 with codes 1 to "
        f"{len(_DTYPES)} can be read",
    )
    dtype = np.dtype(_DTYPES[code - 1])
    size, promised = path.stat().st_size, start + 12 * sequences + 8 * boundaries
    check(size == promised, f"{path} has {size} bytes, its header promises {promised}; {_AGAIN}")
    check(sequences > 0, "the dataset is empty")
    lengths = np.memmap(path, np.int32, "r", start, (sequences,))
    offsets = np.memmap(path, np.int64, "r", start + 4 * sequences, (sequences,))
    documents = np.memmap(path, np.int64, "r", start + 12 * sequences, (boundaries,))
    data_bytes = _check_sequences(prefix, lengths, offsets, dtype.itemsize)
    # Boundaries of documents among the sequences.
    rises = boundaries > 1 and documents[0] == 0 and documents[-1] == sequences
    rises = rises and not (np.diff(documents) < 0).any()
    check(
        bool(rises),
        f"the document boundaries of {path} do not rise from 0 to {sequences}; {_AGAIN}",
    )
    return DatasetIndex(dtype, lengths, data_bytes)


def _check_sequences(
    prefix: str, lengths: np.ndarray, offsets: np.ndarray, token_bytes: int
) -> int:
    """Return the bytes of all sequences. Raise UserError unless each begins where the last ends."""
    end = 0
    for first in range(0, len(lengths), _CHUNK):
        sizes = lengths[first : first + _CHUNK].astype(np.int64) * token_bytes
        ends = end + np.cumsum(sizes)
        wrong = (sizes <= 0) | (offsets[first : first + _CHUNK] != ends - sizes)
        if wrong.any():
            number = first + int(np.argmax(wrong))
            raise UserError(
                f"--data-path {prefix}: sequence {number} of {prefix}.idx has length "
                f"{lengths[number]} and offset {offsets[number]}, which does not follow the one "
                f"before; {_AGAIN}"
            )
        end = int(ends[-1])
    return end


def check_part(
    prefix: str,
    name: str,
    bounds: tuple[float, float],
    seq_length: int,
    split: str | None,
    argument: str = "--data-path",
    samples: float = 0.0,
) -> None:
    """Raise UserError unless a part has the tokens of one sample, and not too many epochs are read.

    Megatron-LM counts the epochs one by one, and lists every document of each of them.

    Args:
        prefix: as the ``argument`` that names the dataset has it.
        name: the part's, for the message.
        bounds: its first and last share of the documents.
        seq_length: tokens of a sample, but for the one that is predicted last.
        split: the value of ``--split``; None for a dataset that is one part as a whole.
        samples: number of samples that the run reads.
    """
    lengths = read_index(prefix).lengths
    # Rounded as Megatron-LM does.
    first, last = (round(bound * len(lengths)) for bound in bounds)
    documents, tokens = last - first, int(lengths[first:last].sum(dtype=np.int64))
    if len(lengths) == 1 and first == last:
        raise UserError(
            f"{argument} {prefix}: one document cannot be divided for the {name} part; preprocess "
            "its text as a single .txt file, which is split into documents, or train without "
            "validation: --split 100,0,0 --eval-iters 0"
        )
    if tokens < seq_length + 1:
        share = f"raise its share in --split {split}, " if split else ""
        raise UserError(
            f"{argument} {prefix}: the {name} part has {documents} of {len(lengths)} documents "
            f"and {tokens} tokens, fewer than the {seq_length + 1} of one sample; {share}"
            "lower --seq-length, or add data"
        )
    epochs = samples * seq_length / tokens
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    require(
        epochs <= _MAX_EPOCHS and epochs * documents * _DOCUMENT_BYTES <= memory,
        f"{argument} {prefix}: the {name} part has {documents} documents and {tokens} tokens, "
        f"which the run would read {epochs:.3g} times; train or evaluate for fewer iterations, or "
        "add data",
    )


def check_dataset(
    prefix: str,
    vocab_size: int,
    tokenizer_model: str | None,
    rows: int | None = None,
    eod: int | None = None,
) -> None:
    """Raise UserError unless PREFIX.bin and PREFIX.idx are whole and fit tokenizer and model.

    The token ids must be below ``vocab_size``, the tokenizer's without padding, and ``rows``, the
    embedding's; None for a model with as many as needed. Checked are the largest id that a sidecar
    PREFIX.json records, whose tokenizer, end of document and digests must fit, too, and the first
    16M ids; ``forward_step`` checks the ids of every batch. ``tokenizer_model`` is the folder with
    tokenizer.json; None for other tokenizers. ``eod`` is the tokenizer's end of document.
    """
    index, check = read_index(prefix), requiring(f"--data-path {prefix}")
    data = f"{prefix}.bin"
    size, promised = Path(data).stat().st_size, index.data_bytes
    check(size == promised, f"{data} has {size} bytes, its index promises {promised}; {_AGAIN}")
    check(np.issubdtype(index.dtype, np.integer), f"holds {index.dtype}, not token ids")
    recorded = 0
    if Path(f"{prefix}.json").is_file():
        recorded = _check_sidecar(prefix, vocab_size, tokenizer_model, eod)
    tokens = np.memmap(data, index.dtype, "r")[:_CHECKED_TOKENS]
    smallest, largest = int(tokens.min()), max(int(tokens.max()), recorded)
    check(
        smallest >= 0 and largest < vocab_size,
        f"has token ids from {smallest} to {largest}, the tokenizer {vocab_size} ids "
        "from 0; give the one the data was made with",
    )
    check(rows is None or largest < rows, beyond_rows(largest, rows or 0))


def beyond_rows(largest: int, rows: int) -> str:
    """Return the end of an error message for token ids without a row in the model's embedding."""
    return (
        f"has token ids up to {largest}, but the model's embedding has {rows} rows; "
        f"--padded-vocab-size {largest + 1} or more adds rows, which a checkpoint has not trained"
    )


def _check_sidecar(
    prefix: str, vocab_size: int, tokenizer_model: str | None, eod: int | None
) -> int:
    """Return the largest token id that the sidecar records; 0 for one of an older version."""
    path, data = Path(f"{prefix}.json"), Path(f"{prefix}.bin")
    sidecar = read_object(path)
    entries = Entries(sidecar, f"--data-path {prefix}: {path}")
    made_with, made_size = sidecar.get("tokenizer_sha256"), entries.integer("vocab_size")
    digests = {data: entries.string(DIGEST)}
    if "index_sha256" in sidecar:  # not in those of an older version
        digests[Path(f"{prefix}.idx")] = entries.string("index_sha256")
    for file, digest in digests.items():
        require(
            digest == data_digest(file),
            f"--data-path {prefix}: {file} is not the data that {path} describes; {_AGAIN}",
        )
    ends = entries.integer("eod", eod, minimum=0) if eod is not None else eod
    require(
        ends == eod,
        f"--data-path {prefix}: made with the end of document {ends}, but --tokenizer-model has "
        f"{eod}; give that tokenizer_config.json or {_AGAIN}",
    )
    file = Path(tokenizer_model or "", "tokenizer.json")
    sha256 = hashlib.sha256(read_small(file)).hexdigest() if file.is_file() else None
    require(
        made_with == sha256 if made_with and sha256 else made_size <= vocab_size,
        f"--data-path {prefix}: made with the tokenizer of sha256 {str(made_with)[:12]} and "
        f"{made_size} ids, but --tokenizer-model has {str(sha256)[:12]} and {vocab_size} ids; "
        f"give that one or {_AGAIN}",
    )
    return entries.integer("largest_id", 0, minimum=0)
