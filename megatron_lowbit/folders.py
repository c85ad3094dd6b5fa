"""Checks of folders that a command is going to write to, and files that appear only when whole."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron_lowbit.errors import UserError, require

METRICS = "metrics.jsonl"
"""File of a run's losses and figures, in the folder of the run."""
STUDY_RUN = "study.json"
"""File of a study's run: seed, command, digests of its files, machine, true if it has finished."""


def check_folder(argument: str, folder: str | Path) -> None:
    """Raise UserError for a folder that cannot be written to, or made; nothing is made.

    A part of its path may be a file, too long, or not writable, or the disk full. ``argument``
    names the folder in the error.
    """
    path = Path(folder).absolute()
    shown = f"{argument} {folder}"
    existing, mode = _nearest(shown, path)
    require(stat.S_ISDIR(mode), f"{shown}: {existing} is a file, not a folder")
    longest = os.pathconf(existing, "PC_NAME_MAX")
    require(
        all(len(os.fsencode(part)) <= longest for part in path.parts),
        f"{shown}: a name is longer than {longest} bytes",
    )
    writable = os.access(existing, os.W_OK | os.X_OK)
    require(writable, f"{shown}: {existing} cannot be written to")
    disk = os.statvfs(existing)
    has_space = disk.f_blocks == 0 or disk.f_bavail > 0
    require(has_space, f"{shown}: no space is left on the disk of {existing}")


def check_file(argument: str, path: str | Path) -> None:
    """Raise UserError where a file cannot be made, or replaced, in a checked folder."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UserError(f"{argument}: {path}: {reason(error)}") from error
    require(not is_folder, f"{argument}: {path} is a folder, not a file")


def _nearest(shown: str, path: Path) -> tuple[Path, int]:
    """Return the first of a path and its parents that exists, and its mode."""
    for candidate in (path, *path.parents):
        try:
            return candidate, candidate.stat().st_mode
        except FileNotFoundError:
            # A link to nothing is not a place where a folder can be made.
            require(not candidate.is_symlink(), f"{shown}: {candidate} is a link to nothing")
        except (OSError, ValueError) as error:
            raise UserError(f"{shown}: {reason(error)}") from error
    raise UserError(f"{shown}: there is no such place")


@contextmanager
def replacing(path: Path, tag: str = "") -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` once it is whole and on the disk.

    Until then it is ``.NAME.partial`` in the same folder, with ``tag`` after the name for processes
    that may write at the same time. Neither name is followed if it is a link.
    """
    partial = path.with_name(f".{path.name}{tag}.partial")
    try:
        with new_file(partial) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace_text(path: Path, text: str, tag: str = "") -> None:
    """Write a file of UTF-8 text with :func:`replacing`."""
    with replacing(path, tag) as stream:
        stream.write(text.encode())


def new_file(path: Path) -> BinaryIO:
    """Open a new file for writing; an older file or link of this name is deleted first."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def sync_directory(directory: Path) -> None:
    """Write a directory's own entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn a failure to read a file into a UserError that names the source."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({reason(error)})") from error


@contextmanager
def writing(argument: str, path: str | Path) -> Iterator[None]:
    """Turn a failure to write, such as a full disk, into a UserError that names the argument."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{argument} {path}: cannot be written ({reason(error)})") from error


def reason(error: Exception) -> str:
    """Return the message of an error of the operating system, without its number and path."""
    return getattr(error, "strerror", None) or str(error)
