"""A folder belongs to one process at a time, however that ends."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.storage.lock import LOCK, FolderLock

HOLD = """
import os, sys, time
from pathlib import Path
from megatron_lowbit.storage.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""
AGAIN = """
import os, sys
from pathlib import Path
from megatron_lowbit.storage.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if len(sys.argv) == 2:
    os.execv(sys.executable, [*sys.orig_argv, "again"])
"""


@pytest.fixture
def held(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a process that locks the folder, and has a child."""
    started = []

    def hold(**environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            env=os.environ | environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process.pid)
        started.append(int(process.stdout.readline()))
        return process

    yield hold
    for process in started:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        FolderLock(folder)
    return str(caught.value)


def take(folder: Path) -> dict:
    """Lock the folder for a moment; return what is on record about it."""
    with closing(FolderLock(folder)):
        return json.loads((folder / LOCK).read_text())


def test_another_process_is_refused_until_the_first_is_killed(tmp_path, held):
    """Also where a process that the first one had forked lives on."""
    process = held()
    assert refusal(tmp_path) == (
        f"--save {tmp_path}: in use by process {process.pid} on {socket.gethostname()}; end that "
        f"run or give another folder (delete {tmp_path / LOCK} only if its host is down)"
    )
    process.kill()
    process.wait()
    assert take(tmp_path)["process"] == os.getpid()


def test_a_released_folder_is_free(tmp_path):
    take(tmp_path)
    subprocess.run([sys.executable, "-c", AGAIN, str(tmp_path)], check=True, timeout=60)


def test_a_job_that_slurm_has_requeued_takes_over(tmp_path, held, monkeypatch, capsys):
    """Its host may be down, and the file system not know it yet."""
    process = held(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    for job, restarts in ((None, None), ("8", "2"), ("7", "1"), ("7", None)):
        for name, value in (("SLURM_JOB_ID", job), ("SLURM_RESTART_COUNT", restarts)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert f"in use by process {process.pid}" in refusal(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert take(tmp_path)["slurm_restarts"] == 2
    assert f"taken over from process {process.pid} on " in capsys.readouterr().out


def test_a_file_that_cannot_be_made_anew(tmp_path, held, monkeypatch):
    """A takeover that fails reports its own error, and closes each descriptor once."""
    held(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    unlink = Path.unlink

    def replace_by_folder(path: Path, missing_ok: bool) -> None:
        unlink(path)
        path.mkdir()

    monkeypatch.setattr(Path, "unlink", replace_by_folder)
    with pytest.raises(IsADirectoryError):
        FolderLock(tmp_path)


def test_a_file_that_cannot_be_removed_hides_no_other_error(tmp_path, monkeypatch):
    def refuse(path: Path, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    lock = FolderLock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        lock.close()
    take(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "[" * 5000, "\0\xff", '{"host": 1}',
                '{"host": "\\u001b[2J", "process": 1, "slurm_restarts": 0}']
)  # fmt: skip
def test_a_damaged_record_names_nobody(tmp_path, held, content):
    held()
    (tmp_path / LOCK).write_text(content)
    assert f"--save {tmp_path}: in use by another process; end" in refusal(tmp_path)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    take(tmp_path)
    assert capsys.readouterr().out == (
        f"{tmp_path / LOCK}: cannot be locked (No locks available): a second run would not be "
        "noticed\n"
    )


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(OSError):
        FolderLock(tmp_path)


def test_a_lock_that_was_taken_over_leaves_the_new_ones_file(tmp_path):
    lock = FolderLock(tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").write_text("another start's")
    lock.close()
    assert (tmp_path / ".lock").read_text() == "another start's"


@pytest.mark.parametrize("content", ["my own notes\n", '{"version": 3}', "7"])
def test_a_file_of_another_program_is_not_overwritten(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    assert refusal(tmp_path) == (
        f"--save {tmp_path}: {tmp_path / LOCK} is of another program; move it or give another place"
    )
    assert (tmp_path / LOCK).read_text() == content


def test_a_record_that_a_power_loss_left_as_zeros_is_overwritten(tmp_path):
    (tmp_path / LOCK).write_bytes(bytes(90))
    assert take(tmp_path)["process"] == os.getpid()


def test_a_link_is_refused(tmp_path):
    (tmp_path / LOCK).symlink_to(tmp_path / "other")
    assert refusal(tmp_path) == f"{tmp_path / LOCK}: a link is not written; delete it"
