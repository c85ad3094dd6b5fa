"""What a rank says, in a log file of its own on request; without one it goes nowhere from here."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lowbit.errors import UserError

RUN_LOG = logging.getLogger("megatron_lowbit.run")
# What goes here is on the console already: not a second time through the root logger's handlers.
RUN_LOG.propagate = False
RUN_LOG.addHandler(logging.NullHandler())


@contextmanager
def rank_log_file(directory: str | None, rank: int) -> Iterator[None]:
    """Append RUN_LOG, warnings, and the error that ends the body to DIRECTORY/rank_00000.log.

    Warnings still reach stderr. Without a directory this does nothing. Raises UserError where the
    file cannot be opened.
    """
    if directory is None:
        yield
        return
    handler = _open(Path(directory) / f"rank_{rank:05d}.log")
    root, level = logging.getLogger(), RUN_LOG.level
    # With a handler of its own the root logger would no longer fall back to this one.
    to_stderr = [] if root.handlers else [logging.lastResort]
    for added in (handler, *to_stderr):
        root.addHandler(added)
    RUN_LOG.addHandler(handler)
    RUN_LOG.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    except BaseException as error:
        RUN_LOG.error("ended by %s", type(error).__name__, exc_info=True)
        raise
    finally:
        logging.captureWarnings(False)
        RUN_LOG.setLevel(level)
        RUN_LOG.removeHandler(handler)
        for added in (handler, *to_stderr):
            root.removeHandler(added)
        handler.close()


def _open(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--log-file-dir: {path}: {error.strerror}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler
