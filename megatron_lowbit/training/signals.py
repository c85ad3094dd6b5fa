"""Signals that ask for an orderly end: finish the iteration, save, exit with 0."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What cluster managers send before they kill; SIGUSR1 is Slurm's usual warning."""


class StopRequest:
    """The name of the last such signal that this process got; None before."""

    received: str | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within it, the stop signals are noted instead of ending the process.

    Only the main thread may enter, as Python allows no other to handle signals.
    """
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        request.received = signal.Signals(number).name

    previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
