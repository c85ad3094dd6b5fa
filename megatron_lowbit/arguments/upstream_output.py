"""Redirection of what Megatron-LM prints and logs, and of Python's warnings."""

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from megatron_lowbit.errors import terminal


class _Redirected(io.TextIOBase):
    """Standard output that passes its text to a function; ``terminal`` is the stream before it."""

    def __init__(self, receive: Callable[[str], object], terminal: TextIO) -> None:
        self._receive, self.terminal = receive, terminal

    def write(self, text: str) -> int:
        """Pass a text, which ``print`` splits into its message and the end of the line."""
        self._receive(text)
        return len(text)


@contextmanager
def redirect_upstream(receive: Callable[[str], object]) -> Iterator[None]:
    """Call a function with each printed, logged or warned text, except the texts of ``say``."""
    from megatron.training import training  # noqa: F401  installs the handler
    from megatron.training.log_handler import CustomHandler

    stream = _Redirected(receive, terminal())
    root = logging.getLogger()
    streams = {h: h.stream for h in root.handlers if isinstance(h, CustomHandler)}
    for handler in streams:
        handler.stream = stream
    logging.captureWarnings(True)
    try:
        with redirect_stdout(stream):
            yield
    finally:
        logging.captureWarnings(False)
        for handler, before in streams.items():
            handler.stream = before
