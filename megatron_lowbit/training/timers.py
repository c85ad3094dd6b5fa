"""How long the phases of an iteration take, and how much memory it needs, on this rank."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

_GIB = 2**30


class PhaseTimer:
    """Measures how long named phases take.

    On a GPU a phase lies between two events on its current stream: measuring never waits for the
    GPU, only :meth:`take` does.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._spans: defaultdict[str, list[tuple]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body; one that raises does not count."""
        start = self._now()
        yield
        self._spans[name].append((start, self._now()))

    def take(self) -> dict[str, float]:
        """Mean seconds of each phase since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        means = {
            name: sum(self._seconds(*span) for span in spans) / len(spans)
            for name, spans in self._spans.items()
        }
        self._spans.clear()
        return means

    def _now(self) -> "float | torch.cuda.Event":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
        return start.elapsed_time(end) / 1000 if self._cuda else end - start


def memory_gib() -> float:
    """GiB: the most that torch ever had allocated on the GPU; without one, what resides in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / _GIB
    return psutil.Process().memory_info().rss / _GIB
