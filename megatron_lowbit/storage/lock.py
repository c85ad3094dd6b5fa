"""Lock of a folder that a run saves into; one process holds it until it ends."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from megatron_lowbit.errors import UserError, say
from megatron_lowbit.json_files import Entries, parse_json

LOCK = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """Exclusive use of a folder by this process, until it is closed or the process ends.

    The lock is the kernel's, so that a killed process leaves none behind, and POSIX's, which the
    processes that a run forks do not inherit: writers of checkpoints may outlive a killed run. It
    holds between hosts where their shared file system passes locks on, as NFS 4 does.

    Where the file system knows no locks, a line is printed and the folder is not locked.

    Args:
        folder: an existing folder, which gets the file ``.lock`` with host and process.

    Raises:
        UserError: another process has the folder.
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._is_mine = folder / LOCK, False
        self._descriptor = self._open()
        try:
            if not self._taken():
                holder = _parse(os.pread(self._descriptor, 4096, 0))
                if not _is_earlier_start(holder):
                    raise UserError(
                        f"--save {folder}: in use by {_name(holder)}; end that run or give another "
                        f"folder (delete {self._file} only if its host is down)"
                    )
                # The file system has not yet noticed that the host of that start is gone.
                say(f"{self._file}: taken over from {_name(holder)}, requeued by Slurm")
                self._file.unlink(missing_ok=True)
                os.close(self._descriptor)
                self._descriptor = self._open()
                if not self._taken():
                    raise UserError(f"--save {folder}: another start of this job took it first")
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(_this_process()).encode() + b"\n", 0)
            self._is_mine = True
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder, and remove the file while no other process can have the lock."""
        if self._is_mine and self._is_current():  # A requeued start may have taken the folder over.
            self._file.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)

    def _taken(self) -> bool:
        """Take the lock, and return False where another process has it, or just had it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
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


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _parse(content: bytes) -> dict[str, Any]:
    """Return what a process has written about itself; nothing where it is not that."""
    try:
        entries = Entries(parse_json(content, LOCK), LOCK)
        holder = {
            "host": entries.string("host"),
            "process": entries.integer("process"),
            "slurm_job": entries.string("slurm_job", default=""),
            "slurm_restarts": entries.integer("slurm_restarts", least=0),
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


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder['process']} on {holder['host']}" if holder else "another process"
