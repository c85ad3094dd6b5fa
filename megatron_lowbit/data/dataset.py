"""Check indexed datasets before a run trains on them."""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.datasets.indexed_dataset import DType

from megatron_lowbit.errors import UserError

_CHECKED_TOKENS = 1 << 24

# The .idx file: magic, version, dtype code, counts of sequences and of document boundaries; then
# int32 lengths, int64 byte offsets (a sequence each), int64 boundaries (little endian throughout).
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")


class DatasetIndex(NamedTuple):
    """Content of PREFIX.idx: token dtype, tokens of each sequence (int32), bytes in PREFIX.bin."""

    dtype: np.dtype
    lengths: np.ndarray
    data_bytes: int


def read_index(prefix: str) -> DatasetIndex:
    """Map PREFIX.idx. Raises UserError for a missing, foreign or truncated file."""
    path = Path(f"{prefix}.idx")
    for file in (path, Path(f"{prefix}.bin")):
        if not file.is_file():
            raise UserError(
                f"--data-path {prefix}: {file} is missing; a dataset is PREFIX.bin and PREFIX.idx"
            )
    with path.open("rb") as stream:
        header = stream.read(_INDEX_HEADER.size)
    if not header.startswith(_INDEX_MAGIC):
        raise UserError(f"--data-path {prefix}: {path} is not the index of a Megatron dataset")
    if len(header) < _INDEX_HEADER.size:
        raise UserError(f"--data-path {prefix}: {path} is truncated; preprocess the data again")
    _, version, code, sequences, boundaries = _INDEX_HEADER.unpack(header)
    if version != 1 or code not in {dtype.value for dtype in DType}:
        raise UserError(
            f"--data-path {prefix}: {path} has version {version} and dtype code {code}; "
            "only version 1 with codes 1 to 8 can be read"
        )
    dtype = np.dtype(DType.dtype_from_code(code))
    expected = _INDEX_HEADER.size + 12 * sequences + 8 * boundaries
    if path.stat().st_size != expected:
        raise UserError(
            f"--data-path {prefix}: {path} has {path.stat().st_size} bytes, "
            f"its header promises {expected}; preprocess the data again"
        )
    if not sequences:
        raise UserError(f"--data-path {prefix}: the dataset is empty")
    lengths = np.memmap(path, np.int32, "r", offset=_INDEX_HEADER.size, shape=(sequences,))
    offsets = np.memmap(
        path, np.int64, "r", offset=_INDEX_HEADER.size + 4 * sequences, shape=(sequences,)
    )
    return DatasetIndex(dtype, lengths, int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize)


def check_part(
    prefix: str, name: str, bounds: tuple[float, float], seq_length: int, split: str
) -> None:
    """Raise UserError unless a part of a dataset has the tokens of one sample.

    Args:
        prefix: as ``--data-path`` has it.
        name: the part's, for the message.
        bounds: its first and last share of the documents.
        seq_length: tokens of a sample, but for the one that is predicted last.
        split: the value of ``--split``.
    """
    lengths = read_index(prefix).lengths
    # Rounded as Megatron-LM does.
    first, last = (round(bound * len(lengths)) for bound in bounds)
    tokens = int(lengths[first:last].sum(dtype=np.int64))
    if tokens < seq_length + 1:
        raise UserError(
            f"--data-path {prefix}: the {name} part has {last - first} of {len(lengths)} documents "
            f"and {tokens} tokens, fewer than the {seq_length + 1} of one sample; raise its "
            f"share in --split {split}, lower --seq-length, or add data"
        )


def check_dataset(prefix: str, vocab_size: int, tokenizer_model: str | None) -> None:
    """Raise UserError unless PREFIX.bin and PREFIX.idx are whole and fit the tokenizer.

    The tokenizer is compared with the sidecar PREFIX.json if there is one; without it the largest
    token id among the first 16M tokens must be below ``vocab_size``.

    Args:
        prefix: as ``--data-path`` has it.
        vocab_size: ids of the tokenizer, not padded.
        tokenizer_model: the folder with tokenizer.json; None for other tokenizers.
    """
    index = read_index(prefix)
    size = Path(f"{prefix}.bin").stat().st_size
    if size != index.data_bytes:
        raise UserError(
            f"--data-path {prefix}: {prefix}.bin has {size} bytes, its index promises "
            f"{index.data_bytes}; preprocess the data again"
        )
    if not np.issubdtype(index.dtype, np.integer):
        raise UserError(f"--data-path {prefix}: holds {index.dtype}, not token ids")
    if Path(f"{prefix}.json").is_file():
        _check_sidecar(prefix, vocab_size, tokenizer_model)
        return
    tokens = np.memmap(f"{prefix}.bin", index.dtype, "r")[:_CHECKED_TOKENS]
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= vocab_size:
        raise UserError(
            f"--data-path {prefix}: has token ids from {smallest} to {largest}, the tokenizer "
            f"{vocab_size} ids from 0; give the one the data was made with"
        )


def _check_sidecar(prefix: str, vocab_size: int, tokenizer_model: str | None) -> None:
    path = Path(f"{prefix}.json")
    try:
        sidecar = json.loads(path.read_bytes())
        made_with, made_size = sidecar["tokenizer_sha256"], int(sidecar["vocab_size"])
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"--data-path {prefix}: {path} must be a JSON object with tokenizer_sha256 and "
            "vocab_size; preprocess the data again"
        ) from None
    file = Path(tokenizer_model or "", "tokenizer.json")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    fits = made_with == sha256 if made_with and sha256 else made_size <= vocab_size
    if not fits:
        raise UserError(
            f"--data-path {prefix}: made with the tokenizer of sha256 {str(made_with)[:12]} and "
            f"{made_size} ids, but --tokenizer-model has {str(sha256)[:12]} and {vocab_size} ids; "
            "give that one or preprocess the data again"
        )


def cache_folder(prefixes: list[str]) -> str:
    """Return a folder beside the first dataset for the indices of samples; make it.

    Its name is a digest of the datasets' document lengths: Megatron-LM names a cached index by the
    dataset's path alone, so that data preprocessed anew under an old name would be read through the
    old index.

    Raises UserError where the folder cannot be written to.
    """
    digest = hashlib.sha256()
    for prefix in prefixes:
        digest.update(read_index(prefix).lengths)
    folder = Path(prefixes[0]).parent / "cache" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"{folder.parent}: cannot be written to; give --data-cache-path")
    return str(folder)
