"""Wait for another process, with its log in the message where it does not come."""

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], log: Path, seconds: float = 300) -> None:
    """Return when the condition holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said(log)[-5000:]
        time.sleep(0.1)


def trained(log: Path, iteration: int) -> bool:
    """Tell whether a run has finished an iteration, by Megatron-LM's log line."""
    return f"iteration {iteration:8d}/" in said(log)


def loaded(log: Path, folder: Path) -> bool:
    """Tell whether a run has gone on from a checkpoint."""
    return f"successfully loaded checkpoint from {folder}" in said(log)


STOPPED = "exiting program after receiving SIGTERM"
"""Megatron-LM's words once it has saved."""


def said(log: Path) -> str:
    """Return the content of a log by now."""
    return log.read_text() if log.exists() else ""
