"""Errors of a run: exceptions of Megatron-LM and torch in one line, and on all ranks alike."""

import errno
import os
import re
import shutil
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowbit.arguments.upstream import in_one_line
from megatron_lowbit.errors import TrainingError, UserError, error_behind, say
from megatron_lowbit.replaced import replaced

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_FULL_TEXT = "unexpected pos"
"""Part of the message of torch's checkpoint writer in C++, which raises no OSError."""
_WORKER_TEXT, _LITTLE = "Worker failure", 64 * 2**20
"""Part of Megatron-LM's message for any error of its writers; bytes, with less the disk is full."""
_UNWRITTEN = re.compile(rf"{_WORKER_TEXT}.* error: (.*{os.sep}.*)")
"""That message with the file and the reason, as ``workarounds.py`` completes it."""
_NO_MEMORY_TEXT = "can't allocate memory"
"""Part of torch's message on a CPU, which is no MemoryError."""
_WITHOUT_APEX = {
    "persist_layer_norm": "--no-persist-layer-norm",
    "masked_softmax_cuda": "--no-masked-softmax-fusion",
}
"""Arguments that local layers on a GPU need without Apex, by a part of the error's message."""


def say_on_rank_0(line: str) -> None:
    """Print a line on the first rank, with control characters escaped."""
    from megatron.training.utils import is_rank0

    if is_rank0():
        say(line)


def gather_from_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, on all ranks; each can be pickled."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def raise_on_all_ranks(doing: str, directory: Path | str = "") -> Iterator[None]:
    """Raise an exception on all ranks if any rank raises one, so that no rank waits for another.

    A UserError or an OSError, also as a cause, becomes the same UserError on all ranks. Any other
    exception is raised again on its own rank, and becomes a RuntimeError on the others. Errors
    without a file say what was done, such as "read the checkpoint in", and the folder.
    """
    caught: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        caught = error
    report = caught and _report(caught, f"cannot {doing} {directory}".rstrip())
    reports = [failure for failure in gather_from_ranks(report) if failure is not None]
    for is_user_error, message in reports:
        if is_user_error:
            raise UserError(message) from caught
    if caught is not None:
        raise caught
    if reports:
        raise RuntimeError(f"another rank failed: {reports[0][1]}")


def _report(error: BaseException, failure: str) -> tuple[bool, str]:
    """Return True for an exception that the user can resolve, and a line that describes it."""
    user_error = error_behind(error, UserError)
    if user_error is not None:
        return True, str(user_error)
    cause = error_behind(error, OSError)
    if cause is not None:
        return True, f"{cause.filename or failure}: {cause.strerror or cause}"
    return False, repr(error)


@contextmanager
def translate_assertions() -> Iterator[None]:
    """Raise UserError with the source line for a check that fails in Megatron-LM.

    Checks are assertions, and RuntimeErrors in the code of process groups.
    """
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        is_check = isinstance(error, AssertionError) or frame.filename.endswith("parallel_state.py")
        if f"{os.sep}megatron{os.sep}" not in frame.filename or not is_check:
            raise
        source = f"{Path(frame.filename).name}:{frame.lineno}"
        raise UserError(f"Megatron-LM ({source}): {_with_way_out(error)}") from error


def _with_way_out(error: BaseException) -> str:
    """Return an exception in one line, with the argument to give where Apex is not installed."""
    message = in_one_line(error)
    flag = next((flag for part, flag in _WITHOUT_APEX.items() if part in message), None)
    return message if flag is None else f"{message}; install Apex, or give {flag}"


@contextmanager
def translate_missing_packages() -> Iterator[None]:
    """Raise UserError where Megatron-LM or torch imports a package that is not installed."""
    try:
        yield
    except ImportError as error:
        if _is_ours(error):
            raise
        raise UserError(f"a package is missing: {_with_way_out(error)}") from error


@contextmanager
def translate_model_errors() -> Iterator[None]:
    """Raise UserError for what Megatron-LM's model configuration refuses, or cannot build."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(in_one_line(error)) from error
    except (TypeError, KeyError, AttributeError, NotImplementedError) as error:
        if _is_ours(error):
            raise
        message = f"{type(error).__name__}: {in_one_line(error)}"
        raise UserError(f"Megatron-LM cannot build the model: {message}") from error


def translate_build_errors(model_config: Any) -> AbstractContextManager[None]:
    """Raise UserError where Megatron-LM cannot build the model of a configuration."""
    builder = model_config.get_builder_cls()
    upstream = builder.build_model

    @wraps(upstream)
    def build_model(*args: Any, **options: Any) -> Any:
        try:
            with translate_model_errors():
                return upstream(*args, **options)
        except RuntimeError as error:
            # Not torch's: Megatron-LM raises it for a package that is missing or too old.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            if _is_ours(error) or not (frame.line or "").startswith("raise "):
                raise
            raise UserError(in_one_line(error)) from error

    return replaced(builder, "build_model", build_model)


def _is_ours(error: Exception) -> bool:
    """Return True if code of this project raised an exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(Path(__file__).parents[2])


@contextmanager
def translate_load_errors(checkpoint: str) -> Iterator[None]:
    """Raise UserError for a checkpoint that Megatron-LM cannot load, such as of another shape.

    Megatron-LM raises any exception on values of another type, or exits with code 0. ``checkpoint``
    names it, and the argument of its directory.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with translate_assertions():
            yield
    except (UserError, TrainingError, MemoryError, torch.OutOfMemoryError):
        raise
    except SystemExit as error:
        raise UserError(f"{checkpoint}: Megatron-LM cannot load it, see above") from error
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        if (refused := error_behind(error, UserError)) is not None:
            raise refused from error
        if (cause := error_behind(error, CheckpointingException)) is not None:
            raise UserError(f"{checkpoint}: {in_one_line(cause)}") from error
        reasons = [reason for reason, _ in getattr(error, "failures", {}).values()]
        reason = reasons[0] if reasons else error
        message = shorten(f"{type(reason).__name__}: {reason}", 400, placeholder=" ...")
        if _NO_MEMORY_TEXT in message:
            raise
        raise UserError(
            f"{checkpoint}: does not fit this model and optimizer, or is damaged: {message}"
        ) from error


@contextmanager
def translate_save_errors(directory: Path | str) -> Iterator[None]:
    """Raise TrainingError where a save cannot write; it names the file, or else the directory."""
    try:
        yield
    except UserError as error:
        raise TrainingError(f"cannot save the checkpoint: {error}") from error
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        cause = error_behind(error, OSError)
        if isinstance(cause, OSError) and not isinstance(cause, ConnectionError):
            text = f"{cause.filename or directory}: {cause.strerror or cause}"
        elif unwritten := _UNWRITTEN.search(str(error)):
            text = unwritten[1]
        else:
            raise
        raise TrainingError(f"cannot save the checkpoint: {text}") from error


@contextmanager
def translate_machine_limits(args: Namespace) -> Iterator[None]:
    """Raise TrainingError for a full disk, and UserError for too little memory."""
    try:
        yield
    except (UserError, TrainingError):
        raise
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        os_error = error_behind(error, OSError)
        is_full = _DISK_FULL_TEXT in str(error) or (os_error and os_error.errno in _DISK_FULL)
        if args.save and _WORKER_TEXT in str(error):
            is_full = is_full or shutil.disk_usage(args.save).free < _LITTLE
        if is_full:
            file = f"--save {args.save}" if args.save else "a file of the run"
            raise TrainingError(f"{file}: cannot be written to, the disk may be full") from error
        message = in_one_line(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY_TEXT in message:
            raise UserError(
                f"the run does not fit into memory, --dry-run estimates what it needs: {message}"
            ) from error
        raise
