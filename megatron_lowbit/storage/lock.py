"""Locks of the folders and files that commands write; one process holds one until it ends."""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.json_files import Entries, parse_json

LOCK = ".lock"


class FolderLock:
    """Exclusive use of an existing folder by this process, until it is closed or the process ends.

    The lock is POSIX's, which a killed process does not leave behind and forked ones do not
    inherit: writers of checkpoints may outlive a killed run. It holds between hosts where their
    file system passes locks on, as NFS 4 does; without locks a line is printed. The folder gets the
    file ``.lock``, or ``file``, with host and process. Errors name the folder by ``label``,
    ``--save FOLDER`` by default.

    Raises UserError where another process has the folder, or the file is a link or of another
    program; OSError where it cannot be written.
    """

    def __init__(self, folder: Path, label: str = "", file: Path | None = None) -> None:
        self._file, self._is_mine = file or folder / LOCK, False
        label = label or f"--save {folder}"
        self._descriptor = self._open()
        try:
            if not self._taken():
                holder = _parse(os.pread(self._descriptor, 4096, 0))
                name = "process {process} on {host}".format(**holder) if holder else ""
                require(
                    _is_earlier_start(holder),
                    f"{label}: in use by {name or 'another process'}; end that run or give another "
                    f"folder (delete {self._file} only if its host is down)",
                )
                # The file system has not yet noticed that the host of that start is gone.
                say(f"{self._file}: taken over from {name}, requeued by Slurm")
                self._file.unlink(missing_ok=True)
                stale, self._descriptor = self._descriptor, self._open()
                os.close(stale)
                require(self._taken(), f"{label}: another start of this job took it first")
            content = os.pread(self._descriptor, 4096, 0).strip(b"\0")  # zeros: after a power loss
            require(
                not content or bool(_parse(content)),
                f"{label}: {self._file} is of another program; move it or give another place",
            )
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(_this_process()).encode() + b"\n", 0)
            self._is_mine = True
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder, and remove the file while no other process can have the lock.

        A file that cannot be removed, as after a disk's errors, is free and hides no other error.
        """
        with suppress(OSError):
            if self._is_mine and self._is_current():  # Not taken over by a requeued start.
                self._file.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _open(self) -> int:
        require(not self._file.is_symlink(), f"{self._file}: a link is not written; delete it")
        return os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)

    def _taken(self) -> bool:
        """Take the lock, and return False where another process has it, or just had it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            reason = f"cannot be locked ({error.strerror}): a second run would not be noticed"
            say(f"{self._file}: {reason}")
        return self._is_current()

    def _is_current(self) -> bool:
        """Tell whether the folder still has the file that was opened; its holder removes it."""
        try:
            return os.path.samestat(os.stat(self._file), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


def output_lock(output: Path) -> FolderLock:
    """Lock a file or folder that need not exist yet, by the file ``.NAME.lock`` in its folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return FolderLock(output, str(output), output.with_name(f".{output.name}.lock"))


@contextmanager
def temporary_folder(path: Path, label: str) -> Iterator[Path]:
    """Make and lock a folder of this command, and delete it at the end.

    One that a killed process left is deleted first. Raises UserError, which names ``label``, where
    another process uses the folder, or it was not made by this function.
    """
    delete_abandoned(path, label)
    require(not os.path.lexists(path), f"{label}: {path} is in the way; move it")
    path.mkdir(parents=True)
    with closing(FolderLock(path, label)):
        try:
            yield path
        finally:
            shutil.rmtree(path)


def delete_abandoned(path: Path, label: str) -> None:
    """Delete a folder that :func:`temporary_folder` made for a process that was killed.

    Raises UserError if the process has not ended.
    """
    if path.is_symlink() or not path.is_dir():
        return
    with suppress(OSError):
        path.rmdir()  # It was killed before it had the lock.
    if (path / LOCK).is_file():
        with closing(FolderLock(path, label)):
            shutil.rmtree(path)


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _parse(content: bytes) -> dict[str, Any]:
    """Return the record that a process has written of itself; {} for any other content."""
    try:
        entries = Entries(parse_json(content, LOCK), LOCK)
        holder: dict[str, Any] = {
            "host": entries.string("host"),
            "process": entries.integer("process"),
            "slurm_job": entries.string("slurm_job", default=""),
            "slurm_restarts": entries.integer("slurm_restarts", minimum=0),
        }
    except UserError:
        return {}
    return holder if holder["host"].isprintable() else {}


def _is_earlier_start(holder: dict[str, Any]) -> bool:
    """Tell whether a process was this Slurm job before it was requeued.

    Slurm starts a job again once it has ended everywhere, while the locks of a host that is down
    may last for minutes.
    """
    this = _this_process()
    return (
        this["slurm_job"] is not None
        and holder.get("slurm_job") == this["slurm_job"]
        and holder["slurm_restarts"] < this["slurm_restarts"]
    )
