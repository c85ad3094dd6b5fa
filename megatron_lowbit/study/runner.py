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
from megatron_lowbit.folders import METRICS
from megatron_lowbit.json_files import Entries, parse_json
from megatron_lowbit.storage import files
from megatron_lowbit.study.definition import (
    Job,
    checkpoints_needed,
    jobs_left,
    launch_command,
    mark,
    planned_iterations,
)

_LOG = "output.log"
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
    """Run the jobs of a whole study that are not finished, and return the finished ones.

    A branch starts as soon as its trunk has saved the checkpoint; a trunk whose checkpoint is gone
    begins again. Interrupted, all runs stop with a checkpoint to resume from. Raises TrainingError
    if a run failed, or the trunk before it saved that checkpoint, once the others have ended.

    Args:
        gpus: numbers of the GPUs that jobs see, or None; a job runs on each at once.
        keep_checkpoints: keep the checkpoints of finished runs from which no other begins.
        judge: asked whenever a run has finished; a trunk whose branches need it is not skipped.
        minutes: time after which runs stop; none is started that, as long as the longest so far,
            would not end before.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=plain_console(stderr=True)) as progress:
        state = _StudyState(jobs, gpus, keep_checkpoints, judge, minutes, progress)
        try:
            state.compare()
            while state.advance():
                pass
        except KeyboardInterrupt:
            stopping = "stopping; Ctrl-C again does not wait for checkpoints"
            progress.update(state.bar, description=stopping)
            raise KeyboardInterrupt("interrupted; the same command resumes the study") from None
        finally:
            _stop(state.running)
    state.end()
    return [job for job in jobs if job in state.finished]


class _StudyState:
    """Jobs of a study that are left, are running, have finished or have failed.

    Attributes:
        trunks: folders of the runs that others begin from.
        left: jobs to start, among them finished trunks that are to train again.
        causes: causes of failures by folder.
        free: a GPU, or None, for each further run that may start.
    """

    def __init__(
        self, jobs: Sequence[Job], gpus: Sequence[str | None], keep_checkpoints: bool, judge: Judge,
        minutes: float | None, progress: Progress,
    ) -> None:  # fmt: skip
        self._jobs, self._keep_checkpoints, self._judge = jobs, keep_checkpoints, judge
        self._minutes, self._progress = minutes, progress
        self._deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._longest = 0.0  # seconds of the longest run
        self.trunks = {job.start.folder for job in jobs if job.start}
        self.left, again = jobs_left(jobs)
        for job in jobs:  # jobs_left has refused folders of others.
            files.restore_tracker(job.folder)
        self.finished = [job for job in jobs if job not in self.left or job in again]
        self.running: list[_Running] = []
        self.causes: dict[Path, str] = {}
        self.free = list(gpus)
        self.bar = progress.add_task("runs", total=len(jobs))

    def compare(self) -> None:
        """Print the comparison of the finished runs, and skip runs that are far behind."""
        line, names = self._judge(self.finished)
        if line:
            self._progress.console.print(line, highlight=False)
        to_train = [job for job in self.left if job not in self.finished and job.name not in names]
        needed = checkpoints_needed(to_train)
        self.left = [job for job in self.left if job in to_train or job.folder in needed]
        ended, more = len(self._done()) + len(self.causes), len(self.running) + len(self.left)
        self._progress.update(self.bar, total=ended + more, completed=ended)

    def _done(self) -> list[Job]:
        """Return the finished runs that do not train again."""
        return [job for job in self.finished if job not in self.left]

    def advance(self) -> bool:
        """Start runs on free GPUs, wait, and finish ended runs; return False at the end."""
        done = {job.folder for job in self._done()}
        startable = [job for job in self.left if not checkpoints_needed([job]).keys() - done]
        has_time = time.monotonic() + self._longest < self._deadline
        for job in startable[: len(self.free)] if has_time else ():
            self.left.remove(job)
            if job in self.finished:
                self.finished.remove(job)
                line = (
                    f"{job.folder}: trains again, because the checkpoint for its branches is gone"
                )
                self._progress.console.print(line, highlight=False, soft_wrap=True)
            self.running.append(_start(job, self.free.pop(0), self._progress))
        if not self.running:
            if not startable:
                starts = ((job.folder, job.start) for job in self.left if job.start)
                self.causes |= {folder: f"{start.folder} failed" for folder, start in starts}
            return False
        time.sleep(0.5)
        if time.monotonic() >= self._deadline:
            return False
        for run in list(self.running):
            self._progress.update(run.task, completed=_iteration(run.job))
            if run.process.poll() is None:
                continue
            self._progress.remove_task(run.task)
            self._progress.advance(self.bar)
            self.free.append(run.gpu)
            self._finish(run)
            if run.job in self.finished:
                self._longest = max(self._longest, time.monotonic() - run.began)
                self.compare()
        return True

    def _finish(self, ended: _Running) -> None:
        """Record that a run has finished, or why it has not."""
        self.running.remove(ended)
        if ended.process.returncode:
            self.causes[ended.job.folder] = _cause(ended)
            return
        done, planned = _done(ended.job), planned_iterations(ended.job)
        if planned is not None and done < planned:
            # By a signal, or by an argument that ends training in time.
            cause = f"ended after {done} of {planned} iterations; the same command continues it"
            self.causes[ended.job.folder] = cause
            return
        mark(ended.job, finished=True)
        if not self._keep_checkpoints and ended.job.folder not in self.trunks:
            _remove_checkpoints(ended.job.folder)
        self.finished.append(ended.job)

    def end(self) -> None:
        """Finish the runs that were stopped, and remove the trunks' checkpoints.

        Raises TrainingError if a run failed.
        """
        for run in list(self.running):
            # Stopped after its last iteration, it is complete.
            if not run.process.returncode and _done(run.job) == planned_iterations(run.job):
                self._finish(run)
        unfinished = len(self.left) + len(self.running) if self._minutes else 0
        if unfinished:
            line = f"{unfinished} runs are left; the same command continues with them"
            say(line, file=sys.stderr)
        if self.causes:
            folders: dict[str, list[str]] = {}
            for folder, cause in self.causes.items():
                folders.setdefault(cause, []).append(str(folder))
            text = "; ".join(f"{', '.join(names)}: {cause}" for cause, names in folders.items())
            count = f"{len(self.causes)} of {len(self._jobs)} runs failed"
            raise TrainingError(f"{count} (see {_LOG} in the folder): {text}")
        if not self._keep_checkpoints and not unfinished:
            for folder in self.trunks:
                _remove_checkpoints(folder)


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
    lines = [line for line in log.splitlines() if line.strip()][-20:]
    errors = [line for line in lines if _ERROR.match(line)]
    return [f"exit code {code}", *(errors or lines)][-1].removeprefix("error: ")


def _remove_checkpoints(folder: Path) -> None:
    for iteration in files.iterations(folder):
        directory = files.iteration_directory(folder, iteration)
        if not directory.is_symlink():
            shutil.rmtree(directory)
    (folder / files.TRACKER).unlink(missing_ok=True)


def _done(job: Job) -> int:
    """Return the last iteration that a run has logged or saved: not every one is logged."""
    return max(_iteration(job), files.latest_iteration(job.folder) or 0)


def _iteration(job: Job) -> int:
    """Return the last iteration that a run has logged."""
    try:
        lines = (job.folder / METRICS).read_bytes().splitlines()
        return Entries(parse_json(lines[-1], METRICS), METRICS).integer("iteration")
    except (OSError, UserError, IndexError):
        return 0
