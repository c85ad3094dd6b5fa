"""The cache of sample indices that Megatron-LM builds beside a dataset."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from megatron_lowbit.data.dataset import read_index
from megatron_lowbit.errors import UserError, require, say

_LOCK = ".lock"


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
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    is_writable = folder.is_dir() and os.access(folder, os.W_OK)
    require(is_writable, f"{folder.parent}: cannot be written to; give --data-cache-path")
    return str(folder)


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache folder, in which every index is whole, while indices are built.

    Megatron-LM writes an index in place and takes any file of the right name for a whole one. One
    that a killed run cut short, or that holds objects instead of numbers, is deleted here, and
    Megatron-LM builds it again. The lock keeps other runs from deleting what is being written; the
    kernel releases it when a process is killed.

    Raises UserError where the folder cannot be made or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"--data-cache-path {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in sorted(folder.glob("*.npy")):
            if not _is_whole(path):
                say(f"{path}: cut short or no index; built again")
                path.unlink()
        yield
    finally:
        os.close(lock)


def _is_whole(path: Path) -> bool:
    """Tell whether a file is an array of numbers of the length that its header gives."""
    try:
        np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        return False
    return True
