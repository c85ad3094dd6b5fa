"""Runs a study's jobs as processes, some at once, and shows how far they are."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from megatron_lowbit.analysis.study import Job, is_finished, launch_command, mark
from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.json_files import Entries, parse_json

_LOG, _METRICS = "output.log", "metrics.jsonl"
_LOOK_S = 0.5


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen
    place: str | None
    task: TaskID


def run(jobs: Sequence[Job], places: Sequence[str | None], keep_checkpoints: bool) -> None:
    """Run what is not finished yet, a job for each of ``places`` at once.

    A place is the number of the GPU that a job sees, or None. A checkpoint is removed when its run
    has ended, unless it is to be kept. Interrupted, all runs stop as they do by themselves, with a
    checkpoint to go on from.

    Raises TrainingError, after all others have ended, where a run failed.
    """
    left = [job for job in jobs if not is_finished(job)]
    free, running, failed = list(places), [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        whole = progress.add_task("runs", total=len(jobs), completed=len(jobs) - len(left))
        try:
            while left or running:
                while left and free:
                    running.append(_start(left.pop(0), free.pop(0), progress))
                time.sleep(_LOOK_S)
                for one in list(running):
                    progress.update(one.task, completed=_iteration(one.job))
                    if one.process.poll() is None:
                        continue
                    running.remove(one)
                    free.append(one.place)
                    progress.remove_task(one.task)
                    progress.advance(whole)
                    if not _end(one, keep_checkpoints):
                        failed.append(one.job)
        finally:
            for one in running:
                one.process.terminate()
            for one in running:
                one.process.wait()
    if failed:
        names = ", ".join(f"{job.name} ({job.folder / _LOG})" for job in failed)
        raise TrainingError(f"{len(failed)} of {len(jobs)} runs failed: {names}")


def _start(job: Job, place: str | None, progress: Progress) -> _Running:
    mark(job, finished=False)
    environment = os.environ if place is None else os.environ | {"CUDA_VISIBLE_DEVICES": place}
    with (job.folder / _LOG).open("a") as log:
        # A group of its own: Ctrl-C reaches this process alone, which then ends the others.
        process = subprocess.Popen(
            launch_command(job), stdout=log, stderr=log, env=environment, start_new_session=True
        )
    task = progress.add_task(f"{job.name}, seed {job.seed}", total=None)
    return _Running(job, process, place, task)


def _end(one: _Running, keep_checkpoints: bool) -> bool:
    """Whether a run that ended did so well."""
    if one.process.returncode:
        return False
    if not keep_checkpoints:
        for directory in one.job.folder.glob("iter_*"):
            shutil.rmtree(directory)
        for file in one.job.folder.glob("latest_*.txt"):
            file.unlink()
    mark(one.job, finished=True)
    return True


def _iteration(job: Job) -> int:
    """The last iteration that a run has logged."""
    try:
        lines = (job.folder / _METRICS).read_bytes().splitlines()
        return Entries(parse_json(lines[-1], _METRICS), _METRICS).integer("iteration")
    except (OSError, UserError, IndexError):
        return 0
