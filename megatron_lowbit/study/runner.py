"""Runs a study's jobs as processes, some at once, and shows how far they are."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.json_files import Entries, parse_json
from megatron_lowbit.study.definition import Job, is_finished, launch_command, mark

_LOG, _METRICS = "output.log", "metrics.jsonl"
_LOOK_S = 0.5


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen
    place: str | None
    task: TaskID


def run(jobs: Sequence[Job], places: Sequence[str | None], keep_checkpoints: bool) -> None:
    """Run what is not finished yet, a job for each of ``places`` at once.

    A place is the number of the GPU that a job sees, or None. A checkpoint is removed when its run,
    and those that begin from it, have ended, unless it is to be kept. Interrupted, all runs stop as
    they do by themselves, with a checkpoint to go on from.

    Raises TrainingError, after all others have ended, where a run failed. A run that begins from
    another's checkpoint fails with it.
    """
    left = [job for job in jobs if not is_finished(job)]
    unready = {job.folder for job in left}
    trunks = {job.start.folder for job in jobs if job.start}
    free, running, failed = list(places), [], []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        whole = progress.add_task("runs", total=len(jobs), completed=len(jobs) - len(left))
        try:
            while left or running:
                ready = [job for job in left if not job.start or job.start.folder not in unready]
                for job in ready[: len(free)]:
                    left.remove(job)
                    running.append(_start(job, free.pop(0), progress))
                if not running:
                    failed += left  # their trunks are in there already
                    break
                time.sleep(_LOOK_S)
                for one in list(running):
                    progress.update(one.task, completed=_iteration(one.job))
                    if one.process.poll() is None:
                        continue
                    running.remove(one)
                    free.append(one.place)
                    progress.remove_task(one.task)
                    progress.advance(whole)
                    if one.process.returncode:
                        failed.append(one.job)
                        continue
                    mark(one.job, finished=True)
                    unready.discard(one.job.folder)
                    if not keep_checkpoints and one.job.folder not in trunks:
                        _remove_checkpoints(one.job.folder)
        finally:
            for one in running:
                one.process.terminate()
            for one in running:
                one.process.wait()
    if not keep_checkpoints and not failed:
        for folder in trunks:
            _remove_checkpoints(folder)
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


def _remove_checkpoints(folder: Path) -> None:
    for directory in folder.glob("iter_*"):
        shutil.rmtree(directory)
    for file in folder.glob("latest_*.txt"):
        file.unlink()


def _iteration(job: Job) -> int:
    """Return the last iteration that a run has logged."""
    try:
        lines = (job.folder / _METRICS).read_bytes().splitlines()
        return Entries(parse_json(lines[-1], _METRICS), _METRICS).integer("iteration")
    except (OSError, UserError, IndexError):
        return 0
