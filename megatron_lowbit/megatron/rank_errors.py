"""Agreement of all ranks on the outcome of an operation that may fail on any of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training.utils import print_rank_0
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowbit.errors import UserError, error_behind, printable


@contextmanager
def raise_on_all_ranks(doing: str, directory: Path | str = "") -> Iterator[None]:
    """Raise an exception on all ranks if any rank raises one, so that no rank waits for another.

    A UserError or an OSError, also as a cause, becomes the same UserError on all ranks. Any other
    exception is raised again on its own rank, and becomes a RuntimeError on the others.

    Args:
        doing: description of the operation for errors, such as "read the checkpoint in".
        directory: folder of the operation, named after the description in errors without a file.
    """
    caught: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        caught = error
    own = caught and _report(caught, f"cannot {doing} {directory}".rstrip())
    failures = [report for report in gather_from_ranks(own) if report is not None]
    for is_user_error, message in failures:
        if is_user_error:
            raise UserError(message) from caught
    if caught is not None:
        raise caught
    if failures:
        raise RuntimeError(f"another rank failed: {failures[0][1]}")


def gather_from_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, on all ranks; each can be pickled."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _report(error: BaseException, failure: str) -> tuple[bool, str]:
    """Return True for an exception that the user can resolve, and a line that describes it."""
    user_error = error_behind(error, UserError)
    if user_error is not None:
        return True, str(user_error)
    cause = error_behind(error, OSError)
    if cause is not None:
        return True, f"{cause.filename or failure}: {cause.strerror or cause}"
    return False, repr(error)


def say_on_rank_0(line: str) -> None:
    """Print a line on the first rank, with control characters escaped."""
    print_rank_0(printable(line))
