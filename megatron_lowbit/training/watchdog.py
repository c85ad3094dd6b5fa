"""No rank waits without end: a run ends when it hangs, or when another rank is lost.

A thread of its own ends a process that makes no progress, also while the main thread sits in a
collective. A collective that fails because its other end is gone becomes a TrainingError.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_lowbit.errors import TrainingError
from megatron_lowbit.training.run_log import RUN_LOG

# Errors that gloo raises as bare RuntimeErrors begin with their place in its source. Its checks of
# what it was called with begin with "[enforce fail at": they stay what they are.
_FROM_GLOO = re.compile(r"\[\S*gloo/\S+:\d+\] ")
_PEER_IS_GONE = re.compile(
    "closed|reset|refused|broken pipe|time(d )?-?out|abort|ncclRemoteError|ncclSystemError", re.I
)
_ADVICE = re.compile(r"\. This is typically caused by .*")  # gloo's, to developers
# How long a full pipe or a locked log file may hold up the last words.
_LAST_WORDS_SECONDS = 5.0


class Watchdog:
    """Within it, ``minutes`` without a :meth:`beat` end this process with exit code 1.

    Before that it says on stderr and in RUN_LOG what was being done and where, and prints the stack
    of each thread. ``doing`` is what the last beat said.
    """

    def __init__(self, minutes: float, rank: int) -> None:
        self._minutes, self.rank = minutes, rank
        self._left = threading.Event()
        self.beat("building the model and the data")

    def beat(self, doing: str) -> None:
        """Say that there is progress, and what begins now."""
        self.doing = doing
        self._deadline = time.monotonic() + 60 * self._minutes

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        while not self._left.wait(min(self._deadline - time.monotonic(), threading.TIMEOUT_MAX)):
            if time.monotonic() >= self._deadline:
                self._end()

    def _end(self) -> None:
        """Leave at once: a main thread that hangs cannot be made to raise anything."""
        backstop = threading.Timer(_LAST_WORDS_SECONDS, os._exit, (1,))
        backstop.daemon = True
        backstop.start()
        try:
            line = (
                f"rank {self.rank}: no progress for {self._minutes:g} minutes in {self.doing}, "
                f"{_main_thread_is()}; --distributed-timeout-minutes"
            )
            # Past Python's stderr, which the main thread may hold, and in one piece on a line of
            # its own: the ranks of a node share the pipe, and the others write their stacks to it.
            os.write(2, f"\nerror: {line}\n".encode())
            faulthandler.dump_traceback(file=2)
            RUN_LOG.error(line)
        finally:
            os._exit(1)


def _main_thread_is() -> str:
    """Where the main thread is, and whether it waits for other ranks there."""
    frame = sys._current_frames()[threading.main_thread().ident]
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    in_torch = frame.f_globals.get("__name__", "").startswith("torch.distributed")
    return f"waiting for other ranks ({where})" if in_torch else f"at {where}"


@contextmanager
def lost_ranks_named(watchdog: Watchdog) -> Iterator[None]:
    """A collective that failed because another rank died or hangs leaves this as TrainingError."""
    try:
        yield
    except RuntimeError as error:
        if not _a_peer_is_gone(error):
            raise
        # torchrun's answer to the lost rank; this process ends anyway, but says why first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = _ADVICE.sub("", _FROM_GLOO.sub("", str(error).splitlines()[0]))
        raise TrainingError(
            f"rank {watchdog.rank}: lost another rank in {watchdog.doing}: it died or hangs, see "
            f"its output ({reason}); --load goes on from the last checkpoint, under torchrun "
            "--max-restarts by itself"
        ) from error


def _a_peer_is_gone(error: RuntimeError) -> bool:
    message = str(error)
    from_torch = isinstance(error, dist.DistError) or _FROM_GLOO.match(message)
    return bool(from_torch and _PEER_IS_GONE.search(message))
