"""The spike score of a loss curve."""

from collections.abc import Sequence

import numpy as np

_WINDOW = 8


def spike_score(losses: Sequence[float] | np.ndarray) -> float:
    """Compute how far, and for how long, a loss leaves its course (MXNorm, appendix J, eq. 22).

    "The area under a detrended, normalized training loss curve above 3 standard deviations"::

        sum over t of max((loss_t - m_t) / sigma - 3, 0)

    Here m_t is the rolling minimum over 8 steps and sigma the standard deviation of the loss itself
    over the last 30% of the steps. What the paper leaves open is taken so: the 8 steps are t - 7 to
    t, fewer at the start; 30% are rounded up to whole steps; sigma divides by their number.

    ``losses`` has one value for every step; those that are not finite are left out. No spikes: 0.
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
