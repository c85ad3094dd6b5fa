"""Waiting for what another process does, with its log in the message where it does not."""

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], log: Path, seconds: float = 180) -> None:
    """Return when the condition holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said(log)[-5000:]
        time.sleep(0.1)


def said(log: Path) -> str:
    """What a log holds by now."""
    return log.read_text() if log.exists() else ""
