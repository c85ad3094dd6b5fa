"""Checkpoints that are written while training goes on."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_lowbit.training.checkpoint import Snapshot, write_snapshot


class BackgroundSaves:
    """Writes one snapshot at a time, in a thread and over a process group of its own.

    A thread, not a process: it ends with its process, however that ends, and a restarted run finds
    nobody who still writes. What takes long in it (copying, hashing, writing) runs beside Python.
    """

    def __init__(self, timeout_minutes: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def start(self, directory: str | Path, snapshot: Snapshot, keep_last: int | None) -> None:
        """Begin to write a snapshot that is a copy; :meth:`wait` for the one before it first."""
        if self._pending is not None:
            raise RuntimeError("a checkpoint is still being written")
        self._pending = self._thread.submit(
            write_snapshot, directory, snapshot, keep_last, self._group
        )

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the last one could not be written: :meth:`wait` raises."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Until nothing is left to write. All ranks call it.

        Raises, on all ranks, what write_snapshot raises.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Until the thread has ended, whatever came of its work."""
        self._thread.shutdown()


@contextmanager
def background_saves(wanted: bool, timeout_minutes: float) -> Iterator[BackgroundSaves | None]:
    """BackgroundSaves, if ``wanted``; the thread has ended when this is left."""
    if not wanted:
        yield None
        return
    saves = BackgroundSaves(timeout_minutes)
    try:
        yield saves
        saves.wait()
    finally:
        saves.close()
