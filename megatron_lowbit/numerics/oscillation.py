"""Weights that oscillate between two quantized values, and their reset.

Source: "TetraJet-v2" (arXiv 2510.27527), OsciReset. Once every ``period`` steps the paths of the
weights w and of their quantized values Q(w) are measured over ``over`` steps:

    R = sum |Q(w_t) - Q(w_t-1)| / sum |w_t - w_t-1|     0 where w does not move

A weight near the middle between two values crosses it back and forth: Q(w) goes a long way while w
goes a short one. Weights with R >= ``ratio`` are then set to Q(w), away from the middle.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OscillationReset:
    """Times of the measurements, and what is reset.

    Args:
        start: iteration of the first measurement; a number below 1 is a share of the run.
        period: iterations from the beginning of a measurement to the next one's.
        over: iterations of a measurement, fewer than ``period``.
        ratio: least R that is reset.
    """

    start: float
    period: int
    over: int = 50
    ratio: float = 8.0

    def __post_init__(self) -> None:
        if not (self.start >= 0 and (self.start < 1 or float(self.start).is_integer())):
            raise ValueError(f"start {self.start:g} is neither an iteration nor a share below 1")
        if not 1 <= self.over < self.period:
            raise ValueError(
                f"over {self.over} is not from 1 to {self.period - 1}, below period {self.period}"
            )
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"ratio {self.ratio:g} is not positive and finite")

    def step(self, iteration: int, total: int) -> int | None:
        """Return the number of finished iterations of a measurement; None outside of one.

        ``iteration`` is the number of finished iterations of the run, ``total`` of all.
        """
        first = round(self.start * total) if self.start < 1 else int(self.start)
        step = (iteration - first) % self.period
        return step if iteration >= first and step <= self.over else None

    def __str__(self) -> str:
        start = f"{self.start:g} of the run" if 0 < self.start < 1 else f"iteration {self.start:g}"
        return (
            f"weights with R >= {self.ratio:g} over {self.over} iterations are reset, "
            f"every {self.period} from {start} on"
        )


class WeightPaths:
    """Lengths of the paths of a weight and of its quantized values, both FP32 of its shape."""

    quantized: Tensor
    """The last call's quantized weight."""

    def __init__(self, like: Tensor) -> None:
        self.of_weight, self.of_quantized = (
            torch.zeros_like(like, dtype=torch.float32) for _ in range(2)
        )
        self._weight: Tensor | None = None

    def advance(self, weight: Tensor, quantized: Tensor) -> None:
        """Add the way from the last call's weight and quantized weight; the first call adds none.

        Both are FP32; ``weight`` is copied, ``quantized`` is kept.
        """
        if self._weight is not None:
            self.of_weight += (weight - self._weight).abs()
            self.of_quantized += (quantized - self.quantized).abs()
        self._weight, self.quantized = weight.clone(), quantized

    def ratio(self) -> Tensor:
        """Return R of each weight."""
        ratio = self.of_quantized / self.of_weight
        return torch.where(self.of_weight == 0, torch.zeros_like(ratio), ratio)
