"""Times of a study's runs, calculated before they start, and the commands that they fit into."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapreplace
from math import inf
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from megatron_lowbit.errors import UserError
from megatron_lowbit.storage import files
from megatron_lowbit.study.definition import Job, checkpoints_needed, jobs_left, training_words


class Pace(NamedTuple):
    """Seconds of an iteration, and those in which the GPU is busy; number of iterations."""

    step: float
    busy: float
    iterations: int

    def seconds(self, at_once: int, start_up: float, begun: int = 0) -> float:
        """Return the seconds of a run after ``begun`` iterations.

        It takes ``start_up`` seconds until the first. While one of the ``at_once`` runs on a GPU
        waits for the CPU, the others use the GPU.
        """
        return start_up + (self.iterations - begun) * max(self.step, at_once * self.busy)


def pace_of(job: Job, gpu: str) -> Pace:
    """Compute the pace of a run on one GPU, as ``lowbit-plan`` does.

    Raises UserError for an unknown GPU and arguments that cannot be planned.
    """
    from megatron_lowbit.planning.estimate import WAITING
    from megatron_lowbit.planning.search import plan_run

    try:
        plan = plan_run(training_words(job), gpu, gpus=1, as_given=True)
        if not plan.tokens:
            raise UserError("its arguments give no --train-iters or no --global-batch-size")
    except UserError as error:
        raise UserError(f"run {job.name!r}: {error}") from error
    best = plan.best
    busy = best.step - best.seconds.get(WAITING, 0.0)
    return Pace(best.step, busy, round(plan.tokens / best.tokens))


def commands_of(
    jobs: Sequence[Job], seconds: Callable[[Job], float], slots: int, limit: float,
    waits: Mapping[Path, float],
) -> list[list[Job]]:  # fmt: skip
    """Divide jobs among commands of ``limit`` seconds, in their order.

    A job starts at the first of ``slots`` that is free if it ends in time; if not, no later job
    starts in that command, as ``lowbit-study run --minutes`` does it. A branch lets later jobs pass
    until its trunk has saved the checkpoint. A job that takes longer than a command gets a command
    of its own and continues from its checkpoint.

    Args:
        waits: seconds from a trunk's start to the checkpoint that it has yet to save, by folder.
    """
    commands: list[list[Job]] = []
    free: list[float] = []  # times at which the slots of the last command are free, a heap
    left, saved = list(jobs), dict.fromkeys(waits, inf)

    def start_of(job: Job) -> float:
        return max(free[0], saved.get(job.start.folder, 0.0) if job.start else 0.0)

    while left:
        commands.append([])
        free = [0.0] * slots
        saved = {folder: time for folder, time in saved.items() if time == inf}
        while left:
            job = min(left, key=start_of)
            start = start_of(job)
            end = start + seconds(job)
            if commands[-1] and end > limit:
                break
            left.remove(job)
            commands[-1].append(job)
            heapreplace(free, end)
            if job.folder in waits:
                saved[job.folder] = start + waits[job.folder]
    return commands


def described(
    jobs: Sequence[Job], gpu: str, slots: int, at_once: int, minutes: float, start_up: float
) -> Iterator[Table | str]:
    """Describe the time of each name's runs, and the commands for all runs that are left.

    ``jobs`` are of the whole study. ``slots`` runs go on at a time on all GPUs together,
    ``at_once`` on each; a command takes ``minutes``, a run ``start_up`` seconds until its first
    iteration.
    """
    left, _ = jobs_left(jobs)
    starts = {job.name: job.start.iteration if job.start else 0 for job in jobs}
    paces = {job.name: pace_of(job, gpu) for job in reversed(jobs)}
    whole = {name: paces[name].seconds(at_once, start_up, start) for name, start in starts.items()}
    seconds = {
        job.folder: paces[job.name].seconds(
            at_once, start_up, files.last_saved(job.folder) or starts[job.name]
        )
        for job in left
    }
    table = Table("run", "iterations", "ms per iteration", "ms busy", "minutes per run", "left")
    for name in dict.fromkeys(job.name for job in jobs):
        pace, count = paces[name], sum(job.name == name for job in left)
        cells = (f"{1e3 * pace.step:.1f}", f"{1e3 * pace.busy:.1f}", f"{whole[name] / 60:.1f}")
        table.add_row(name, str(pace.iterations - starts[name]), *cells, str(count))
    yield table
    needed = checkpoints_needed(left)
    waits = {
        job.folder: seconds[job.folder] - paces[job.name].seconds(at_once, 0.0, needed[job.folder])
        for job in left
        if job.folder in needed
    }
    commands = commands_of(left, lambda job: seconds[job.folder], slots, 60 * minutes, waits)
    hours = sum(seconds.values()) / slots / 3600
    yield (
        f"{len(left)} of {len(jobs)} runs are left: {hours:.1f} hours on {slots} places at least, "
        f"{len(commands)} commands of {minutes:g} minutes"
    )
    for number, command in enumerate(commands, 1):
        yield f"  {number}: " + ", ".join(f"{job.name} {job.seed}" for job in command)
    if long := dict.fromkeys(job.name for job in left if seconds[job.folder] > 60 * minutes):
        yield f"longer than a command, to be continued in the next: {', '.join(long)}"
