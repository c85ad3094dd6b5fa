"""Indexed datasets for training: check them, build the splits, iterate over batches.

Sample order is a pure function of the seed, the data and the number of samples asked for, and
batches are a pure function of the samples consumed: a resumed run sees what it would have seen.
"""

import hashlib
import json
import os
import struct
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import megatron_lowbit.megatron  # noqa: F401  must come before megatron.core

# isort: split
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType

from megatron_lowbit.errors import UserError
from megatron_lowbit.data.tokenizer import Tokenizer

_SPLIT_NAMES = ("train", "validation", "test")
_CHECKED_TOKENS = 1 << 24
_BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")

# The .idx file: magic, version, dtype code, counts of sequences and of document boundaries; then
# int32 lengths, int64 byte offsets (a sequence each), int64 boundaries (little endian throughout).
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")


class DatasetIndex(NamedTuple):
    """What PREFIX.idx says: token dtype, tokens of each sequence (int32), bytes in PREFIX.bin."""

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


def check_dataset(prefix: str, tokenizer: Tokenizer) -> None:
    """Raise UserError unless PREFIX.bin and PREFIX.idx are whole and fit ``tokenizer``.

    The tokenizer is compared with the sidecar PREFIX.json if there is one; without it the
    largest token id among the first 16M tokens must be below ``tokenizer.vocab_size``.
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
        _check_sidecar(prefix, tokenizer)
        return
    tokens = np.memmap(f"{prefix}.bin", index.dtype, "r")[:_CHECKED_TOKENS]
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= tokenizer.vocab_size:
        raise UserError(
            f"--data-path {prefix}: has token ids from {smallest} to {largest}, the tokenizer "
            f"{tokenizer.vocab_size} ids from 0; give the one the data was made with"
        )


def _check_sidecar(prefix: str, tokenizer: Tokenizer) -> None:
    path = Path(f"{prefix}.json")
    try:
        sidecar = json.loads(path.read_bytes())
        made_with, vocab_size = sidecar["tokenizer_sha256"], int(sidecar["vocab_size"])
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"--data-path {prefix}: {path} must be a JSON object with tokenizer_sha256 and "
            "vocab_size; preprocess the data again"
        ) from None
    if made_with and tokenizer.sha256:
        fits = made_with == tokenizer.sha256
    else:
        fits = vocab_size <= tokenizer.vocab_size
    if not fits:
        raise UserError(
            f"--data-path {prefix}: made with the tokenizer of sha256 {str(made_with)[:12]} and "
            f"{vocab_size} ids, but --tokenizer-model has {str(tokenizer.sha256)[:12]} and "
            f"{tokenizer.vocab_size} ids; give that one or preprocess the data again"
        )


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """``[prefix]`` or ``[weight, prefix, weight, prefix, ...]`` to prefixes and weights.

    A single prefix has weights None. Raises UserError for anything else.
    """
    if len(data_path) == 1:
        return [data_path[0]], None
    try:
        weights = [float(weight) for weight in data_path[::2]]
        valid = len(data_path) % 2 == 0 and all(0 < weight < float("inf") for weight in weights)
    except ValueError:
        valid = False
    if not data_path or not valid:
        raise UserError(
            f"--data-path {' '.join(data_path)}: give one PREFIX, or WEIGHT PREFIX pairs with "
            "positive weights"
        )
    prefixes = list(data_path[1::2])
    return prefixes, weights if len(prefixes) > 1 else None


def build_datasets(
    args: Namespace, tokenizer: Tokenizer, sample_counts: tuple[int, int, int]
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Build the training, validation and test datasets; one with a count of 0 is None.

    A dataset has at least its count of samples, repeating the data as needed; a sample is a dict
    of 1-D tensors of ``seq_length``. Call on every rank, with torch.distributed initialized if
    several prefixes are blended. Reads of ``args``: data_path, split, seq_length, seed,
    data_cache_path (None: a folder ``cache`` beside the first prefix).
    Raises UserError for arguments or data that do not fit.
    """
    prefixes, weights = parse_data_path(args.data_path)
    _check_split(args.split)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(prefixes, weights),
        split=args.split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        # Attention makes the causal mask itself where none is given.
        create_attention_mask=False,
    )
    for split, samples in enumerate(sample_counts):
        if samples:
            for prefix in prefixes:
                _check_enough_data(args, prefix, _SPLIT_NAMES[split], config.split_matrix[split])
        else:
            # Counting the epochs of an empty split never ends, so leave out what is not needed.
            config.split_matrix[split] = None
    config.path_to_cache = _cache_folder(args.data_cache_path, prefixes)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, list(sample_counts), lambda: True, config)
    train, valid, test = builder.build()
    return train, valid, test


def _check_split(split: str) -> None:
    try:
        shares = [float(share) for share in split.split(",")]
        valid = len(shares) <= 3 and min(shares) >= 0 and 0 < sum(shares) < float("inf")
    except ValueError:
        valid = False
    if not valid:
        raise UserError(
            f"--split {split}: give up to three shares (train, validation, test), e.g. 969,30,1"
        )


def _check_enough_data(
    args: Namespace, prefix: str, name: str, bounds: tuple[float, float] | None
) -> None:
    """A split needs tokens for one sample; ``bounds`` are its first and last share of documents."""
    lengths = read_index(prefix).lengths
    # Rounded as the builder does.
    first, last = (round(bound * len(lengths)) for bound in bounds or (0.0, 0.0))
    tokens = int(lengths[first:last].sum(dtype=np.int64))
    if tokens < args.seq_length + 1:
        raise UserError(
            f"--data-path {prefix}: the {name} part has {last - first} of {len(lengths)} documents "
            f"and {tokens} tokens, fewer than the {args.seq_length + 1} of one sample; raise its "
            f"share in --split {args.split}, lower --seq-length, or add data"
        )


def _cache_folder(data_cache_path: str | None, prefixes: list[str]) -> str:
    """A writable folder for the indices, its name a digest of the datasets' document lengths.

    megatron-core names a cached index by path, seed and lengths of samples only: without the
    digest, data preprocessed anew under an old name would be read through the old index.
    """
    root = Path(data_cache_path) if data_cache_path else Path(prefixes[0]).parent / "cache"
    digest = hashlib.sha256()
    for prefix in prefixes:
        digest.update(read_index(prefix).lengths)
    folder = root / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"--data-cache-path {root}: not a folder that can be written to")
    return str(folder)


def batch_iterator(
    dataset: Dataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's micro-batches for ever, starting after ``consumed_samples`` of all ranks.

    Each is a dict of ``(micro_batch_size, seq_length)`` tensors: tokens, labels, position_ids
    (int64) and loss_mask (float32). The stream of samples is the dataset again and again without
    gaps; ranks take consecutive slices of it, so it is the same for every ``dp_size``. Torch's
    global random state is not touched.
    """
    if len(dataset) == 0:
        raise ValueError("the dataset has no samples")

    def slices() -> Iterator[list[int]]:
        start = consumed_samples + dp_rank * micro_batch_size
        for first in count(start, micro_batch_size * dp_size):
            yield [index % len(dataset) for index in range(first, first + micro_batch_size)]

    loader = DataLoader(
        dataset,
        batch_sampler=slices(),
        collate_fn=_stack,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        # Its own generator: the default would draw a worker seed from the global one.
        generator=torch.Generator(),
    )
    return iter(loader)


def _stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in _BATCH_KEYS}
