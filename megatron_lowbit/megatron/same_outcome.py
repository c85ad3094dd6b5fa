"""One outcome on all ranks of an operation that may fail on any of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowbit.errors import UserError

_Error = TypeVar("_Error", bound=BaseException)


@contextmanager
def same_outcome(
    doing: str, directory: Path, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Let an exception inside on any rank leave on every rank, so that none waits for another.

    UserError and whatever the operating system caused become one UserError everywhere; another
    exception is raised again where it occurred and as RuntimeError on the other ranks.
    """
    caught: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        caught = error
    reports: list[Any] = [None] * dist.get_world_size()
    report = caught and _report(caught, f"cannot {doing} {directory}")
    dist.all_gather_object(reports, report, group)
    failed = [report for report in reports if report is not None]
    for is_user_error, message in failed:
        if is_user_error:
            raise UserError(message) from caught
    if caught is not None:
        raise caught
    if failed:
        raise RuntimeError(f"another rank failed: {failed[0][1]}")


def error_behind(error: BaseException, kind: type[_Error]) -> _Error | None:
    """Return the ``kind`` that caused an exception, also by way of torch's; or None."""
    if isinstance(error, kind):
        return error
    below = [error.__cause__, error.__context__]
    if isinstance(error, CheckpointException):
        below += [failure for failure, _ in error.failures.values()]
    return next(filter(None, (error_behind(cause, kind) for cause in below if cause)), None)


def _report(error: BaseException, failure: str) -> tuple[bool, str]:
    """Return whether an exception is the user's to mend, and one line about it."""
    mistake = error_behind(error, UserError)
    if mistake is not None:
        return True, str(mistake)
    cause = error_behind(error, OSError)
    if cause is not None:
        return True, f"{failure}: {cause.strerror or cause}"
    return False, repr(error)
