"""Standings of a study: gaps of finished runs while others run, and names far behind."""

import math
from collections.abc import Sequence

from megatron_lowbit.analysis.comparison import Contender, Row, compare, read_contenders
from megatron_lowbit.analysis.comparison_picture import gap_text
from megatron_lowbit.study.definition import Job


def standing(finished: Sequence[Job], names: Sequence[str]) -> list[Row]:
    """Compare the finished runs, the baseline first; nothing before a run of it has finished."""
    jobs = sorted(finished, key=lambda job: names.index(job.name))
    if not jobs or jobs[0].name != names[0]:
        return []
    return compare(contenders_of(jobs))


def contenders_of(jobs: Sequence[Job]) -> list[Contender]:
    """Read the runs of jobs."""
    return read_contenders([(job.name, job.folder) for job in jobs], [job.seed for job in jobs])


def described(rows: Sequence[Row]) -> str:
    """Describe the gaps to the baseline in one line."""
    return ", ".join(f"{row.name} {gap_text(row)} ({_seeds(row)})" for row in rows[1:])


def _seeds(row: Row) -> str:
    return f"{row.seeds} seed" + "s" * (row.seeds > 1)


def far_behind(rows: Sequence[Row], errors: float) -> set[str]:
    """Return the names whose gap exceeds the least one by so many standard errors of both.

    Each has two seeds or more, or has diverged; the baseline, which all are compared with, is none.
    """
    diverged = {row.name for row in rows[1:] if math.isnan(row.loss)}
    known = [row for row in rows[1:] if row.seeds > 1 and row.gap_error > 0]
    if not known:
        return diverged
    best = min(known, key=lambda row: row.gap)
    return diverged | {
        row.name
        for row in known
        if row.gap - best.gap > errors * math.hypot(row.gap_error, best.gap_error)
    }
