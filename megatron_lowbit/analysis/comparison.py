"""Runs against a baseline: final losses, gaps with their noise, spikes, speed."""

import math
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_lowbit.analysis.loss_curve import LossCurve, read_losses, recent_means
from megatron_lowbit.errors import require
from megatron_lowbit.folders import METRICS, STUDY_RUN
from megatron_lowbit.json_files import Entries, read_object

FINAL_SHARE = 1 / 20
"""Share of a run's iterations, the last, that the final loss is the mean of."""


class Contender(NamedTuple):
    """The runs of one name, one for each seed; ``seeds`` has None for one that is unknown."""

    name: str
    curves: tuple[LossCurve, ...]
    seeds: tuple[int | None, ...] = ()


class Row(NamedTuple):
    """Figures of a contender; gaps are relative to the baseline's final loss.

    ``gap`` is NaN unless all runs of both names have the same number of tokens. ``gap_error`` is
    its standard error, NaN where no name has two seeds, and ``pairs`` the number of seeds that both
    names have, or of all without such. ``loss_spread`` is the standard deviation over seeds, NaN
    for one; ``perplexity`` is the last validation's, the mean over seeds, with its standard
    deviation, NaN where a run has none; ``spikes`` is the mean spike score, NaN where a run has no
    loss for every step, or other steps than the baseline; ``speed`` is the median of tokens/s.
    """

    name: str
    seeds: int
    pairs: int
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

    The seed of a study's run is in its folder. Raises UserError for a file that cannot be read, and
    for two runs of a name with the same losses or the same seed.
    """
    contenders: dict[str, Contender] = {}
    for name, path in runs:
        before = contenders.get(name, Contender(name, ()))
        file = path / METRICS if path.is_dir() else path
        curve, seed = read_losses(file), _recorded_seed(file.with_name(STUDY_RUN))
        is_new = not any(np.array_equal(curve.losses, other.losses) for other in before.curves)
        require(is_new, f"{path}: has the losses of another run of {name!r}; give another seed")
        is_new = seed is None or seed not in before.seeds
        require(is_new, f"{path}: has seed {seed}, as another run of {name!r}; give another seed")
        contenders[name] = Contender(name, (*before.curves, curve), (*before.seeds, seed))
    require(bool(contenders), "give at least one run")
    return list(contenders.values())


def _recorded_seed(file: Path) -> int | None:
    if not file.exists():
        return None
    return Entries(read_object(file), str(file)).integer("seed", minimum=0, maximum=2**32)


def final_loss(curve: LossCurve, share: float = FINAL_SHARE) -> float:
    """Return the mean over the last share of a run's iterations, of at least one that is logged.

    The share is of the whole run, also of a run that began from the checkpoint of another. NaN if
    one of these losses is not finite: the run has diverged.
    """
    return float(curve.losses[-_final_count(curve, share) :].mean())


def _final_count(curve: LossCurve, share: float) -> int:
    last = curve.iterations.max(initial=0)
    return max(1, int((curve.iterations > round((1 - share) * last)).sum()))


def _end(curve: LossCurve) -> float:
    """Return the number of tokens of a run, or of its iterations if it has not logged tokens."""
    return float(curve.iterations[-1] if np.isnan(curve.tokens[-1]) else curve.tokens[-1])


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
    step without a loss here and there, a skipped update's, is ignored.
    """
    steps = np.diff(curve.iterations)
    is_whole = len(steps) > 0 and np.median(steps) == 1
    return spike_score(curve.losses) if is_whole else math.nan


def compare(contenders: Sequence[Contender], share: float = FINAL_SHARE) -> list[Row]:
    """Compute a row for each contender, with gaps to the first, the baseline, by :func:`gaps`.

    A final loss is the mean over ``share`` of a run.
    """
    losses = [[final_loss(curve, share) for curve in contender.curves] for contender in contenders]
    rows = []
    for contender, finals, (gap, error) in zip(
        contenders, losses, gaps(losses, [each.seeds for each in contenders]), strict=True
    ):
        both = [*contenders[0].curves, *contender.curves]
        if len({_end(curve) for curve in both}) > 1:
            gap = error = np.array(math.nan)
        perplexities = [perplexity(curve) for curve in contender.curves]
        have_same_steps = len({(curve.iterations[0], curve.iterations[-1]) for curve in both}) == 1
        scores = [spikes(c) if have_same_steps else math.nan for c in contender.curves]
        speeds = np.concatenate([curve.speeds for curve in contender.curves])
        speed = float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else math.nan
        common = _common(contender.seeds, contenders[0].seeds)
        rows.append(Row(
            contender.name, len(finals), len(common) or len(finals), fmean(finals),
            _spread(finals), float(gap), float(error),
            fmean(perplexities), _spread(perplexities), fmean(scores), speed,
        ))  # fmt: skip
    return rows


def far_behind(rows: Sequence[Row], errors: float) -> set[str]:
    """Return the names whose gap exceeds the least one by so many standard errors of both.

    Each has two seeds or more, or has diverged; the baseline, which all are compared with, is none.
    """
    diverged = {row.name for row in rows[1:] if math.isnan(row.loss)}
    known = [row for row in rows[1:] if row.seeds > 1 and row.gap_error > 0]
    best = min(known, key=lambda row: row.gap, default=None)
    return diverged | {
        row.name
        for row in known
        if best and row.gap - best.gap > errors * math.hypot(row.gap_error, best.gap_error)
    }


def gaps(
    values: Sequence[ArrayLike], seeds: Sequence[Sequence[int | None]] | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compute relative gaps to the first, and their standard errors, from values for each seed.

    A gap is the mean over the seeds that both have, seed by seed, since a seed draws the same
    weights and data for both; without such seeds it is from two independent means. The noise of all
    is pooled. The first axis of each name's ``values`` is the seeds; others, such as steps, are
    kept. Two names of which no seed is known have the same if they have as many values.
    """
    arrays = [np.asarray(of_name) for of_name in values]
    baseline, mean = arrays[0], np.mean(arrays[0], axis=0)
    of_baseline, *of_others = seeds or [()] * len(arrays)
    paired = [
        _ratios(array, drawn, baseline, of_baseline)
        for array, drawn in zip(arrays[1:], of_others, strict=True)
    ]
    noise = _pooled_deviation([array / mean for array in arrays])
    paired_noise = _pooled_deviation([ratios for ratios in paired if ratios is not None])
    pairs = [(np.zeros_like(mean), np.zeros_like(mean))]
    for array, ratios in zip(arrays[1:], paired, strict=True):
        if ratios is None:
            gap = array.mean(axis=0) / mean - 1
            error = noise * math.sqrt(1 / len(array) + 1 / len(baseline))
        else:
            gap = ratios.mean(axis=0) - 1
            error = paired_noise / math.sqrt(len(ratios))
        pairs.append((gap, np.where(np.isnan(gap), np.nan, error)))
    return pairs


def _ratios(
    values: np.ndarray, seeds: Sequence[int | None],
    baseline: np.ndarray, of_baseline: Sequence[int | None],
) -> np.ndarray | None:  # fmt: skip
    """Divide the values of common seeds by the baseline's; return None if there are none."""
    if {*seeds, *of_baseline} <= {None}:
        return values / baseline if len(values) == len(baseline) else None
    common = _common(seeds, of_baseline)
    ours, theirs = ([drawn.index(seed) for seed in common] for drawn in (seeds, of_baseline))
    return values[ours] / baseline[theirs] if common else None


def _common(seeds: Sequence[int | None], others: Sequence[int | None]) -> list[int]:
    return [seed for seed in seeds if seed is not None and seed in others]


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds; NaN for one, and where one is."""
    known = len(values) > 1 and not any(map(math.isnan, values))
    return stdev(values) if known else math.nan


def _pooled_deviation(groups: Sequence[np.ndarray]) -> np.ndarray:
    """Return the standard deviation within groups; NaN where no group has two values.

    A group with a value that is not finite is ignored.
    """
    squares = freedom = np.zeros(())
    for group in groups:
        square = ((group - group.mean(axis=0)) ** 2).sum(axis=0)
        squares = squares + np.where(np.isfinite(square), square, 0)
        freedom = freedom + np.where(np.isfinite(square), len(group) - 1, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(squares / freedom))


def visible_gap(error: float, seeds: int, more: int) -> float:
    """Return the true gap that ``more`` seeds on both sides show with a chance of 80%.

    ``error`` is the standard error of a gap of so many ``seeds``. Shown is a gap of more than two
    standard errors. The power of a test of a mean whose variance is known (Cohen, Statistical Power
    Analysis for the Behavioral Sciences, 1988, chapter 2).
    """
    return (2.0 + NormalDist().inv_cdf(0.8)) * error * math.sqrt(seeds / more)


class GapCurve(NamedTuple):
    """Relative gaps of a name by tokens, with their standard errors; NaN where they are unknown."""

    tokens: np.ndarray
    gap: np.ndarray
    error: np.ndarray


def gap_curves(contenders: Sequence[Contender], share: float = FINAL_SHARE) -> list[GapCurve]:
    """Compute the gap of each name over training; the first is the baseline.

    As for a final loss, a seed's loss at an iteration is the mean over as many logged iterations,
    those that end there: the curve of a whole run ends at the gap of its row. A run from the
    checkpoint of another begins once it has as many.
    """
    baseline = contenders[0].curves
    iterations = reduce(np.intersect1d, (curve.iterations for curve in baseline))
    tokens = baseline[0].tokens[np.isin(baseline[0].iterations, iterations)]
    losses = [
        [_losses_at(iterations, c, share) for c in contender.curves] for contender in contenders
    ]
    seeds = [contender.seeds for contender in contenders]
    return [GapCurve(tokens, gap, error) for gap, error in gaps(losses, seeds)]


def _losses_at(iterations: np.ndarray, curve: LossCurve, share: float) -> np.ndarray:
    """Return averaged losses at these iterations, NaN at those that a run has not logged."""
    count = _final_count(curve, share)
    means = recent_means(curve.losses, count)
    if len(iterations) and curve.iterations[0] > iterations[0]:
        means[: count - 1] = np.nan
    losses = np.full(len(iterations), np.nan)
    _, here, there = np.intersect1d(iterations, curve.iterations, return_indices=True)
    losses[here] = means[there]
    return losses


_WINDOW = 8


def spike_score(losses: Sequence[float] | np.ndarray) -> float:
    """Compute how far, and for how long, a loss leaves its course (MXNorm, appendix J, eq. 22).

    "The area under a detrended, normalized training loss curve above 3 standard deviations"::

        sum over t of max((loss_t - m_t) / sigma - 3, 0)

    Here m_t is the rolling minimum over 8 steps and sigma the standard deviation of the loss itself
    over the last 30% of the steps. Choices that the paper leaves open: the 8 steps are t - 7 to
    t, fewer at the start; 30% are rounded up to whole steps; sigma divides by their number.

    ``losses`` has one value for every step; those that are not finite are ignored. No spikes: 0.
    NaN where sigma is 0, as it is with fewer than 4 steps.
    """
    curve = np.asarray(losses, dtype=np.float64)
    curve = curve[np.isfinite(curve)]
    last = (3 * len(curve) + 9) // 10
    sigma = curve[len(curve) - last :].std() if last else 0.0
    if sigma == 0:
        return float("nan")
    padded = np.concatenate([np.full(_WINDOW - 1, np.inf), curve])
    minimum = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW).min(axis=1)
    return float(np.maximum((curve - minimum) / sigma - 3, 0).sum())
