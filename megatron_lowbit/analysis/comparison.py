"""Runs against a baseline: final losses, gaps with their noise, spikes, speed."""

import math
import statistics
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_lowbit.analysis.loss_curve import LossCurve, read_losses, relative_gap, smooth
from megatron_lowbit.analysis.spike_score import spike_score
from megatron_lowbit.errors import UserError

FINAL_SHARE = 1 / 20
"""Share of the logged iterations that the final loss is the mean of."""


class Contender(NamedTuple):
    """The runs of one name, one for each seed."""

    name: str
    curves: tuple[LossCurve, ...]


class Row(NamedTuple):
    """Figures of a contender; gaps are relative to the baseline's final loss.

    ``loss_spread`` is the standard deviation over seeds, NaN for one, and ``gap_error`` the gap's
    standard error, NaN where no name has two seeds; ``perplexity`` is that of the last validation,
    the mean over seeds, with its standard deviation, NaN where a run has none; ``spikes`` is the
    mean spike score, NaN where a run has no loss for every step, ``speed`` the median of tokens/s.
    """

    name: str
    seeds: int
    loss: float
    loss_spread: float
    gap: float
    gap_error: float
    perplexity: float
    perplexity_spread: float
    spikes: float
    speed: float


def read_contenders(runs: Sequence[tuple[str, Path]]) -> list[Contender]:
    """Read named runs, each a metrics.jsonl or the folder that holds one; equal names are seeds.

    Raises UserError for a file that cannot be read.
    """
    found: dict[str, list[LossCurve]] = {}
    for name, path in runs:
        file = path / "metrics.jsonl" if path.is_dir() else path
        found.setdefault(name, []).append(read_losses(file))
    if not found:
        raise UserError("give at least one run")
    return [Contender(name, tuple(curves)) for name, curves in found.items()]


def final_loss(curve: LossCurve) -> float:
    """Return the mean over the last part of the logged iterations, at least one."""
    losses = curve.losses[np.isfinite(curve.losses)]
    if not len(losses):
        return math.nan
    return float(losses[-max(1, round(len(curve.losses) * FINAL_SHARE)) :].mean())


def perplexity(curve: LossCurve) -> float:
    """Return the perplexity of the last validation; NaN without one that is finite."""
    if not len(curve.validation_losses):
        return math.nan
    try:
        return math.exp(curve.validation_losses[-1])
    except OverflowError:
        return math.nan


def spikes(curve: LossCurve) -> float:
    """Return the spike score of a run; NaN where its file has no loss for every step.

    The score is a sum over steps: a curve of every tenth step would give about a tenth of it. A
    step without a loss here and there, a skipped update's, is left out.
    """
    steps = np.diff(curve.iterations)
    if not len(steps) or np.median(steps) != 1:
        return math.nan
    return spike_score(curve.losses)


def compare(contenders: Sequence[Contender]) -> list[Row]:
    """Compute a row for each; the first is the baseline. Gaps and errors are those of ``gaps``."""
    losses = [[final_loss(curve) for curve in contender.curves] for contender in contenders]
    found = zip(contenders, losses, gaps(losses), strict=True)
    return [_row(contender, own, *gap) for contender, own, gap in found]


def gaps(values: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Compute relative gaps to the first, and their standard errors, from values for each seed.

    A gap is the mean over seeds, seed by seed where there are as many on both sides, since a seed
    draws the same weights and data for both; else that of two independent means. The noise is taken
    to be the same for all and pooled, since a few seeds of one say little about it.
    """
    baseline = values[0]
    mean = statistics.fmean(baseline)
    paired = [_ratios(own, baseline) for own in values[1:]]
    noise = _pooled_deviation([[value / mean for value in own] for own in values])
    paired_noise = _pooled_deviation([ratios for ratios in paired if ratios])
    found = [(0.0, 0.0)]
    for own, ratios in zip(values[1:], paired, strict=True):
        if ratios:
            gap = statistics.fmean(ratios) - 1
            found.append((gap, paired_noise / math.sqrt(len(ratios))))
        else:
            gap = statistics.fmean(own) / mean - 1
            found.append((gap, noise * math.sqrt(1 / len(own) + 1 / len(baseline))))
    return found


def _row(contender: Contender, losses: Sequence[float], gap: float, error: float) -> Row:
    perplexities = [perplexity(curve) for curve in contender.curves]
    speeds = np.concatenate([curve.speeds for curve in contender.curves])
    return Row(
        contender.name,
        len(losses),
        statistics.fmean(losses),
        _spread(losses),
        gap,
        error,
        statistics.fmean(perplexities),
        _spread(perplexities),
        statistics.fmean(spikes(curve) for curve in contender.curves),
        float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else math.nan,
    )


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds; NaN for one, and where one is."""
    known = len(values) > 1 and not any(map(math.isnan, values))
    return statistics.stdev(values) if known else math.nan


def _ratios(losses: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Divide seed by seed; return an empty list for unequal numbers."""
    if len(losses) != len(baseline):
        return []
    return [loss / base for loss, base in zip(losses, baseline, strict=True)]


def _pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation within groups; NaN where no group has two values."""
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return math.nan
    return math.sqrt(sum(statistics.pvariance(g) * len(g) for g in groups) / freedom)


class GapCurve(NamedTuple):
    """Smoothed relative gaps by tokens: the mean over seeds, the least and the largest."""

    tokens: np.ndarray
    mean: np.ndarray
    least: np.ndarray
    largest: np.ndarray


def gap_curve(contender: Contender, baseline: Contender, window: int) -> GapCurve:
    """Compute gaps to the baseline's mean over seeds, so that its own band shows the noise.

    ``window``: logged iterations to smooth over.
    """
    reference = _mean_curve(baseline)
    gaps = [relative_gap(curve, reference) for curve in contender.curves]
    common = reduce(np.intersect1d, (iterations for iterations, _ in gaps))
    rows = np.array([smooth(gap[np.isin(its, common)], window) for its, gap in gaps])
    first = contender.curves[0]
    tokens = first.tokens[np.isin(first.iterations, common)]
    return GapCurve(tokens, rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0))


def _mean_curve(contender: Contender) -> LossCurve:
    common = reduce(np.intersect1d, (curve.iterations for curve in contender.curves))
    losses = [curve.losses[np.isin(curve.iterations, common)] for curve in contender.curves]
    return contender.curves[0]._replace(iterations=common, losses=np.mean(losses, axis=0))
