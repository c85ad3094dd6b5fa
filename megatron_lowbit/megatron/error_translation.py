"""Translation of exceptions of Megatron-LM and torch into errors of one line."""

import errno
import os
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowbit.arguments.parse import in_one_line
from megatron_lowbit.errors import TrainingError, UserError, error_behind

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_FULL_TEXT = "unexpected pos"
"""Part of the message of torch's checkpoint writer in C++, which raises no OSError."""
_GROUPS = "parallel_state.py"
"""Megatron-LM's file that makes process groups."""
_NO_MEMORY_TEXT = "can't allocate memory"
"""Part of torch's message on a CPU, which is no MemoryError."""


@contextmanager
def translate_assertions() -> Iterator[None]:
    """Raise UserError with the source line for a check that fails in Megatron-LM.

    Checks are assertions, and those of process groups RuntimeErrors.
    """
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        is_check = isinstance(error, AssertionError) or frame.filename.endswith(_GROUPS)
        if f"{os.sep}megatron{os.sep}" not in frame.filename or not is_check:
            raise
        source = f"{Path(frame.filename).name}:{frame.lineno}"
        raise UserError(f"Megatron-LM ({source}): {in_one_line(error)}") from error


@contextmanager
def translate_missing_packages() -> Iterator[None]:
    """Raise UserError where Megatron-LM or torch imports a package that is not installed."""
    try:
        yield
    except ImportError as error:
        if _is_ours(error):
            raise
        raise UserError(f"a package is missing: {in_one_line(error)}") from error


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


def _is_ours(error: Exception) -> bool:
    """Return True if code of this project raised an exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(Path(__file__).parents[1])


@contextmanager
def translate_load_errors(place: str) -> Iterator[None]:
    """Raise UserError for a checkpoint that Megatron-LM cannot load, such as of another shape.

    Megatron-LM raises any exception on values of another type, or exits with code 0.

    Args:
        place: the checkpoint, and the argument that names its directory.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with translate_assertions():
            yield
    except (UserError, TrainingError, MemoryError, torch.OutOfMemoryError):
        raise
    except SystemExit as error:
        raise UserError(f"{place}: Megatron-LM cannot load it, see above") from error
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        if (refused := error_behind(error, UserError)) is not None:
            raise refused from error
        if (cause := error_behind(error, CheckpointingException)) is not None:
            raise UserError(f"{place}: {in_one_line(cause)}") from error
        reasons = [reason for reason, _ in getattr(error, "failures", {}).values()]
        reason = reasons[0] if reasons else error
        message = shorten(f"{type(reason).__name__}: {reason}", 400, placeholder=" ...")
        if _NO_MEMORY_TEXT in message:
            raise
        raise UserError(
            f"{place}: does not fit this model and optimizer, or is damaged: {message}"
        ) from error


@contextmanager
def translate_machine_limits(args: Namespace) -> Iterator[None]:
    """Raise TrainingError for a full disk, and UserError for too little memory."""
    try:
        yield
    except (UserError, TrainingError):
        raise
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        os_error = error_behind(error, OSError)
        if _DISK_FULL_TEXT in str(error) or (os_error and os_error.errno in _DISK_FULL):
            place = f"--save {args.save}" if args.save else "a file of the run"
            raise TrainingError(f"{place}: cannot be written to, the disk may be full") from error
        message = in_one_line(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY_TEXT in message:
            raise UserError(
                f"the run does not fit into memory, --dry-run estimates what it needs: {message}"
            ) from error
        raise
