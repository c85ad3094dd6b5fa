"""Runs a study's jobs as processes, some at once, and shows how far they are."""

import ctypes
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import TrainingError, UserError, printable, say
from megatron_lowbit.json_files import Entries, parse_json
from megatron_lowbit.storage import files
from megatron_lowbit.study.definition import (
    Job,
    has_checkpoint,
    is_finished,
    launch_command,
    mark,
    planned_iterations,
)

_LOG, _METRICS = "output.log", "metrics.jsonl"
_LOOK_S = 0.5
_LAST_LINES = 20
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
_ERROR = re.compile(r"[\w.]*(error|Error|Exception)\b")


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen
    place: str | None
    task: TaskID
    began: float


Judge = Callable[[Sequence[Job]], tuple[str, set[str]]]
"""Gives, of the finished jobs, what to print and the names whose other jobs are left out."""


def run(
    jobs: Sequence[Job],
    places: Sequence[str | None],
    keep_checkpoints: bool,
    judge: Judge,
    minutes: float | None = None,
) -> list[Job]:
    """Run what is not finished yet, and return what is finished.

    A run whose checkpoint is gone begins again where another is to begin from it. Interrupted, all
    runs stop with a checkpoint to resume from.

    Args:
        jobs: of the whole study.
        places: numbers of the GPUs that jobs see, or None; a job runs on each at once.
        keep_checkpoints: keep those of runs that have ended, and from which no other begins.
        judge: asked whenever a run has finished; names that others begin from are not left out.
        minutes: time after which runs stop; none is started that, as long as the longest so far,
            would not end before.

    Raises:
        TrainingError: a run failed, or the one that it begins from; the others have ended.
    """
    finished = [job for job in jobs if is_finished(job)]
    starts = {job.start.folder for job in jobs if job.start and job not in finished}
    finished = [one for one in finished if one.folder not in starts or has_checkpoint(one.folder)]
    left = [job for job in jobs if job not in finished]
    unready = {job.folder for job in left}
    trunks = {job.start.folder for job in jobs if job.start}
    free, running = list(places), []
    failures: dict[Path, str] = {}
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    longest = 0.0  # seconds of the longest run
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=plain_console(stderr=True)) as progress:
        whole = progress.add_task("runs", total=len(jobs), completed=len(finished))

        def leave_out() -> None:
            line, names = judge(finished)
            if line:
                progress.console.print(line, highlight=False)
            left[:] = [job for job in left if job.name not in names or job.folder in trunks]
            progress.update(whole, total=len(finished) + len(left) + len(running) + len(failures))

        try:
            leave_out()
            while left or running:
                ready = [job for job in left if not job.start or job.start.folder not in unready]
                for job in ready[: len(free)] if time.monotonic() + longest < end else ():
                    left.remove(job)
                    running.append(_start(job, free.pop(0), progress))
                if not running:
                    if not ready:
                        failures |= {job.folder: f"{job.start.folder} failed" for job in left}
                    break
                time.sleep(_LOOK_S)
                if time.monotonic() >= end:
                    break
                for one in list(running):
                    progress.update(one.task, completed=_iteration(one.job))
                    if one.process.poll() is None:
                        continue
                    running.remove(one)
                    free.append(one.place)
                    progress.remove_task(one.task)
                    progress.advance(whole)
                    cause = _finish(one, keep_checkpoints or one.job.folder in trunks)
                    if cause:
                        failures[one.job.folder] = cause
                    else:
                        longest = max(longest, time.monotonic() - one.began)
                        unready.discard(one.job.folder)
                        finished.append(one.job)
                        leave_out()
        except KeyboardInterrupt:
            progress.update(
                whole, description="stopping; Ctrl-C again does not wait for checkpoints"
            )
            raise KeyboardInterrupt("interrupted; the same command resumes the study") from None
        finally:
            _stop(running)
    for one in [one for one in running if _is_complete(one)]:
        running.remove(one)
        _finish(one, keep_checkpoints or one.job.folder in trunks)
        finished.append(one.job)
    unfinished = len(left) + len(running) if minutes else 0
    if unfinished:
        say(f"{unfinished} runs are left; the same command continues with them", file=sys.stderr)
    if not keep_checkpoints and not failures and not unfinished:
        for folder in trunks:
            _remove_checkpoints(folder)
    if failures:
        count = f"{len(failures)} of {len(jobs)} runs failed"
        raise TrainingError(f"{count} (see {_LOG} in the folder): {_summary(failures)}")
    return [job for job in jobs if job in finished]


def _finish(one: _Running, keep_checkpoints: bool) -> str | None:
    """Record that a run has ended; return the cause if it failed."""
    if one.process.returncode:
        return _cause(one)
    mark(one.job, finished=True)
    if not keep_checkpoints:
        _remove_checkpoints(one.job.folder)
    return None


def _is_complete(one: _Running) -> bool:
    """Return True for a run that was stopped after its last iteration."""
    return not one.process.returncode and _iteration(one.job) == planned_iterations(one.job)


def _stop(running: Sequence[_Running]) -> None:
    """End runs, which save a checkpoint first; at a further Ctrl-C, end them at once."""
    for one in running:
        one.process.terminate()
    try:
        for one in running:
            one.process.wait()
    except KeyboardInterrupt:
        for one in running:
            one.process.kill()
            one.process.wait()
        raise


def _cause(one: _Running) -> str:
    """Return why a run failed: the last error of its log, or the signal that ended it."""
    if one.process.returncode < 0:
        return f"ended by {signal.Signals(-one.process.returncode).name}"
    log = (one.job.folder / _LOG).read_text(errors="replace")
    lines = [line for line in log.splitlines() if line.strip()][-_LAST_LINES:]
    errors = [line for line in lines if _ERROR.match(line)]
    return [f"exit code {one.process.returncode}", *(errors or lines)][-1].removeprefix("error: ")


def _summary(failures: dict[Path, str]) -> str:
    """Name the folders of failed runs, each cause once."""
    folders: dict[str, list[str]] = {}
    for folder, cause in failures.items():
        folders.setdefault(cause, []).append(str(folder))
    return "; ".join(f"{', '.join(names)}: {cause}" for cause, names in folders.items())


def _start(job: Job, place: str | None, progress: Progress) -> _Running:
    total = planned_iterations(job)
    mark(job, finished=False)
    environment = os.environ if place is None else os.environ | {"CUDA_VISIBLE_DEVICES": place}
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(job.folder / _LOG, flags, 0o666), "a") as log:
        # A group of its own: Ctrl-C reaches only this process, which then ends the others.
        process = subprocess.Popen(
            launch_command(job), stdout=log, stderr=log, env=environment, start_new_session=True,
            preexec_fn=_end_with_parent,
        )  # fmt: skip
    task = progress.add_task(printable(f"{job.name}, seed {job.seed}"), total=total)
    return _Running(job, process, place, task, time.monotonic())


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process once its parent is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _remove_checkpoints(folder: Path) -> None:
    for iteration in files.iterations(folder):
        directory = files.iteration_directory(folder, iteration)
        if not directory.is_symlink():
            shutil.rmtree(directory)
    (folder / files.TRACKER).unlink(missing_ok=True)


def _iteration(job: Job) -> int:
    """Return the last iteration that a run has logged."""
    try:
        lines = (job.folder / _METRICS).read_bytes().splitlines()
        return Entries(parse_json(lines[-1], _METRICS), _METRICS).integer("iteration")
    except (OSError, UserError, IndexError):
        return 0
