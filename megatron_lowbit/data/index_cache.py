"""Cache of sample indices that Megatron-LM builds for datasets: its folder, lock and verification.

    ROOT/DIGEST/HASH-CLASS-SPLIT-description.txt    what the index is for, JSON whose MD5 is HASH
    ROOT/DIGEST/HASH-CLASS-SPLIT-document_index.npy   ..., sample_index.npy and shuffle_index.npy
    ROOT/DIGEST/HASH-CLASS-SPLIT-dataset_index.npy    and dataset_sample_index.npy, of a blend

ROOT is ``--data-cache-path``, or the folder ``cache`` of the first dataset. Files of any other name
are neither read nor changed.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lowbit.data.dataset import read_index
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.folders import replacing
from megatron_lowbit.json_files import as_object, parse_json
from megatron_lowbit.replaced import replaced

_LOCK, _DESCRIPTION = ".lock", "description.txt"
_NAME = re.compile(
    r"(([0-9a-f]{32})-\w+-(?:train|valid|test))-(description\.txt|"
    r"(?:document|sample|shuffle|dataset|dataset_sample)_index\.npy)",
    re.A,
)


def cache_folder(
    prefixes: list[str],
    root: str | None = None,
    content: Callable[[str], Any] = lambda prefix: read_index(prefix).lengths,
) -> str:
    """Return the folder for the indices of samples; make it.

    Its name is a digest of the datasets' content: Megatron-LM names a cached index by the dataset's
    path, so that other data under the same path would be read through the old index. Raises
    UserError for a folder that cannot be written to, or is a link.

    Args:
        prefixes: the datasets.
        root: value of ``--data-cache-path``; None selects ``cache`` next to the first dataset.
        content: function from a dataset to the bytes on which its indices depend; by default the
            lengths of its documents.
    """
    digest = hashlib.sha256()
    for prefix in prefixes:
        digest.update(content(prefix))
    parent = Path(root) if root else Path(prefixes[0]).parent / "cache"
    folder = parent / digest.hexdigest()[:16]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    is_writable = folder.is_dir() and os.access(folder, os.W_OK)
    require(is_writable, f"{parent}: cannot be written to; give --data-cache-path")
    for path in (folder,) if root else (parent, folder):
        require(not path.is_symlink(), f"{path}: a link is not followed; give --data-cache-path")
    return str(folder)


@contextmanager
def building(folder: Path, prefixes: Sequence[str] = ()) -> Iterator[None]:
    """Hold the lock of a cache folder while Megatron-LM builds the indices that are missing.

    Wrong indices of the given datasets are deleted first, so that Megatron-LM builds them again.
    Every array is written under a temporary name and renamed once it is on the disk.

    The lock keeps other runs from deleting what is being written; the kernel releases it when a
    process is killed.

    Raises UserError if the folder cannot be made or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UserError(f"--data-cache-path {folder}: {error.strerror}") from error
    save = np.save

    def save_whole(file: str, array: np.ndarray, **settings: Any) -> None:
        with replacing(Path(file)) as stream:
            save(stream, array, **settings)

    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _delete_wrong(folder, prefixes)
        with replaced(np, "save", save_whole):
            yield
    finally:
        os.close(lock)


def _delete_wrong(folder: Path, prefixes: Sequence[str]) -> None:
    """Delete and print the indices that are not right, with links in the places of their files."""
    indices: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        if name := _NAME.fullmatch(path.name):
            indices.setdefault(name[1], {})[name[3]] = path
    for base, files in indices.items():
        try:
            is_right = _is_right(files, base.partition("-")[0], prefixes)
        except (LookupError, TypeError, ValueError, ArithmeticError, OSError, EOFError):
            is_right = False
        if not is_right:
            for path in files.values():
                path.unlink()
            say(f"{folder / base}: the cached index is wrong or not whole; built again")


def _is_right(files: dict[str, Path], digest: str, prefixes: Sequence[str]) -> bool:
    """Return True for an index that fits its dataset, or whose dataset is none of these.

    ``files`` are by the last part of their names, ``digest`` is the MD5 of the description.
    """
    if any(path.is_symlink() or not path.is_file() for path in files.values()):
        return False
    text = files[_DESCRIPTION].read_bytes()
    if hashlib.md5(text, usedforsecurity=False).hexdigest() != digest:
        return False
    description = as_object(parse_json(text, _DESCRIPTION), _DESCRIPTION)

    def array(name: str) -> np.ndarray:
        path = files[f"{name}_index.npy"]
        loaded: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return loaded

    if "datasets" in description:
        count = len(description["datasets"])
        return is_blend_index(array("dataset"), array("dataset_sample"), count)
    prefix: Any = description.get("dataset_path")
    if prefix is not None and prefix not in prefixes:
        return True
    lengths = read_index(prefix).lengths
    # The part of the dataset's documents, rounded as Megatron-LM does.
    matrix = description["split_matrix"]  # None: the part is a dataset of its own.
    number = ("train", "valid", "test").index(description["index_split"])
    bounds = (0.0, 1.0) if matrix is None else matrix[number]
    part = range(*(round(bound * len(lengths)) for bound in bounds))
    documents, samples, order = map(array, ("document", "sample", "shuffle"))
    length = description["sequence_length"]
    return _is_sample_index(documents, samples, order, lengths, part, length)


_CHUNK = 1 << 22


def _is_sample_index(
    documents: np.ndarray,
    samples: np.ndarray,
    order: np.ndarray,
    lengths: np.ndarray,
    part: range,
    sequence_length: int,
) -> bool:
    """Return True if samples are what Megatron-LM makes of documents, and each is read once.

    Args:
        documents: document index (D,), int32: the part's documents of all epochs.
        samples: sample index (N+1, 2), of integers: entry of ``documents`` and offset in tokens
            at which a sample begins; the last row is the end of the last sample.
        order: shuffle index (N,), of integers: the sample of each step.
        lengths: tokens of each document of the dataset, int32.
        part: the documents for training, validation or test.
        sequence_length: tokens of a sample.
    """
    from megatron.core.datasets.helpers import build_sample_idx

    count = len(samples) - 1
    are_integers = samples.dtype.kind == "i" and order.dtype.kind in "iu"
    if not are_integers or documents.dtype != np.int32 or documents.ndim != 1:
        return False
    if order.shape != (count,) or not _is_within(order, count):
        return False
    is_there = np.zeros(count, bool)
    is_there[order] = True
    if not is_there.all() or not _has_whole_epochs(documents, part):
        return False
    epochs = len(documents) // len(part)
    tokens = int(lengths[part.start : part.stop].sum(dtype=np.int64))
    # The last token may be a label only. Known before what Megatron-LM allocates for the samples.
    if count != (epochs * tokens - 1) // sequence_length:
        return False
    expected = build_sample_idx(lengths, documents, sequence_length, epochs, tokens)
    return np.array_equal(samples, expected)


def is_blend_index(datasets: np.ndarray, samples: np.ndarray, count: int) -> bool:
    """Return True if a blend reads the samples of each of its datasets in order.

    ``datasets`` and ``samples`` (N,), of integers, are the dataset of each step, one of ``count``,
    and its sample of that.
    """
    if not (datasets.dtype.kind == samples.dtype.kind == "i" and datasets.ndim == 1):
        return False
    if datasets.shape != samples.shape or not _is_within(datasets, count):
        return False
    each = (samples[datasets == number] for number in range(count))
    return all(np.array_equal(numbers, np.arange(len(numbers))) for numbers in each)


def _is_within(values: np.ndarray, end: int) -> bool:
    return values.size == 0 or (values.min() >= 0 and values.max() < end)


def _has_whole_epochs(documents: np.ndarray, part: range) -> bool:
    """Return True if all documents of a part are there equally often, and no other one."""
    if not len(documents) or documents.min() < part.start or documents.max() >= part.stop:
        return False
    times = np.zeros(len(part), np.int64)
    for first in range(0, len(documents), _CHUNK):
        numbers = documents[first : first + _CHUNK] - part.start
        times += np.bincount(numbers, minlength=len(part))
    return bool((times == times[0]).all())
