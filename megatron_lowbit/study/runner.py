"""Run a study's jobs as processes, several at once, and show their progress."""

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
_POLL_SECONDS = 0.5
_LAST_LINES = 20
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
_ERROR = re.compile(r"[\w.]*(error|Error|Exception)\b")


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen[bytes]
    gpu: str | None
    task: TaskID
    began: float


Judge = Callable[[Sequence[Job]], tuple[str, set[str]]]
"""Function from the finished jobs to a line to print and the names whose other jobs are skipped."""


def run(
    jobs: Sequence[Job], gpus: Sequence[str | None], keep_checkpoints: bool, judge: Judge,
    minutes: float | None = None,
) -> list[Job]:  # fmt: skip
    """Run the jobs that are not finished, and return the finished ones.

    A run whose checkpoint is gone begins again where another is to begin from it. Interrupted, all
    runs stop with a checkpoint to resume from.

    Args:
        jobs: of the whole study.
        gpus: numbers of the GPUs that jobs see, or None; a job runs on each at once.
        keep_checkpoints: keep the checkpoints of finished runs from which no other begins.
        judge: asked whenever a run has finished; names that others begin from are not skipped.
        minutes: time after which runs stop; none is started that, as long as the longest so far,
            would not end before.

    Raises:
        TrainingError: a run failed, or the one that it begins from; the others have ended.
    """
    trunks = {job.start.folder for job in jobs if job.start}
    finished = [job for job in jobs if is_finished(job)]
    needed = {job.start.folder for job in jobs if job.start and job not in finished}
    finished = [job for job in finished if job.folder not in needed or has_checkpoint(job.folder)]
    left = [job for job in jobs if job not in finished]
    running: list[_Running] = []
    causes: dict[Path, str] = {}
    free = list(gpus)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    longest = 0.0  # seconds of the longest run

    def finish(ended: _Running) -> None:
        """Record that a run has ended, or the cause of its failure."""
        running.remove(ended)
        if ended.process.returncode:
            causes[ended.job.folder] = _cause(ended)
            return
        mark(ended.job, finished=True)
        if not keep_checkpoints and ended.job.folder not in trunks:
            _remove_checkpoints(ended.job.folder)
        finished.append(ended.job)

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=plain_console(stderr=True)) as progress:
        bar = progress.add_task("runs", total=len(jobs), completed=len(finished))

        def compare() -> None:
            """Print how the finished runs compare, and skip runs that are far behind."""
            line, names = judge(finished)
            if line:
                progress.console.print(line, highlight=False)
            left[:] = [job for job in left if job.name not in names or job.folder in trunks]
            progress.update(bar, total=len(finished) + len(left) + len(running) + len(causes))

        try:
            compare()
            while left or running:
                done = {job.folder for job in finished}
                ready = [job for job in left if not job.start or job.start.folder in done]
                for job in ready[: len(free)] if time.monotonic() + longest < end else ():
                    left.remove(job)
                    running.append(_start(job, free.pop(0), progress))
                if not running:
                    if not ready:
                        starts = ((job.folder, job.start) for job in left if job.start)
                        causes |= {folder: f"{start.folder} failed" for folder, start in starts}
                    break
                time.sleep(_POLL_SECONDS)
                if time.monotonic() >= end:
                    break
                for each in list(running):
                    progress.update(each.task, completed=_iteration(each.job))
                    if each.process.poll() is None:
                        continue
                    progress.remove_task(each.task)
                    progress.advance(bar)
                    free.append(each.gpu)
                    finish(each)
                    if each.job in finished:
                        longest = max(longest, time.monotonic() - each.began)
                        compare()
        except KeyboardInterrupt:
            stopping = "stopping; Ctrl-C again does not wait for checkpoints"
            progress.update(bar, description=stopping)
            raise KeyboardInterrupt("interrupted; the same command resumes the study") from None
        finally:
            _stop(running)
    for each in list(running):
        # Stopped after its last iteration, it is complete.
        if not each.process.returncode and _iteration(each.job) == planned_iterations(each.job):
            finish(each)
    unfinished = len(left) + len(running) if minutes else 0
    if unfinished:
        say(f"{unfinished} runs are left; the same command continues with them", file=sys.stderr)
    if causes:
        folders: dict[str, list[str]] = {}
        for folder, cause in causes.items():
            folders.setdefault(cause, []).append(str(folder))
        text = "; ".join(f"{', '.join(names)}: {cause}" for cause, names in folders.items())
        count = f"{len(causes)} of {len(jobs)} runs failed"
        raise TrainingError(f"{count} (see {_LOG} in the folder): {text}")
    if not keep_checkpoints and not unfinished:
        for folder in trunks:
            _remove_checkpoints(folder)
    return [job for job in jobs if job in finished]


def _start(job: Job, gpu: str | None, progress: Progress) -> _Running:
    total = planned_iterations(job)
    mark(job, finished=False)
    environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(job.folder / _LOG, flags, 0o666), "a") as log:
        # A group of its own: Ctrl-C reaches only this process, which then ends the others.
        process = subprocess.Popen(
            launch_command(job), stdout=log, stderr=log, env=environment, start_new_session=True,
            # The kernel sends SIGTERM once this process is killed.
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )  # fmt: skip
    task = progress.add_task(printable(f"{job.name}, seed {job.seed}"), total=total)
    return _Running(job, process, gpu, task, time.monotonic())


def _stop(running: Sequence[_Running]) -> None:
    """End runs, which save a checkpoint first; at a further Ctrl-C, end them at once."""
    for each in running:
        each.process.terminate()
    try:
        for each in running:
            each.process.wait()
    except KeyboardInterrupt:
        for each in running:
            each.process.kill()
            each.process.wait()
        raise


def _cause(ended: _Running) -> str:
    """Return the cause of a failure: the log's last error, or the signal that ended the run."""
    code = ended.process.returncode
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    log = (ended.job.folder / _LOG).read_text(errors="replace")
    lines = [line for line in log.splitlines() if line.strip()][-_LAST_LINES:]
    errors = [line for line in lines if _ERROR.match(line)]
    return [f"exit code {code}", *(errors or lines)][-1].removeprefix("error: ")


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
