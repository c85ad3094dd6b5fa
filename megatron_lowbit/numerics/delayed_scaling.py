"""Delayed scaling: a tensor's scale from the amaxes of earlier steps.

Source: Transformer Engine's DelayedScaling (the maximum of the history); the moving average is the
other variant in use. The scale is then known before the tensor is, which saves a pass over it.
"""

from copy import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_STEPS = 2**16
_NONE = -1.0  # an amax is never negative


@dataclass(frozen=True)
class DelayedScaling:
    """Rule by which earlier amaxes become the one that a scale is made from.

    Args:
        length: steps that count.
        algorithm: ``max`` of them, or their exponential moving ``average`` from the oldest on,
            each weighing 2 / (length + 1) against what came before.
        just_in_time: as long as fewer steps than this are recorded, the tensor's own amax is used;
            None waits for the whole length. May be larger, for the unsteady start of a run.
    """

    length: int = 16
    algorithm: Literal["max", "average"] = "max"
    just_in_time: int | None = None

    def __post_init__(self) -> None:
        for name in ("length", "just_in_time"):
            steps = getattr(self, name)
            if steps is not None and not 1 <= steps <= MAX_STEPS:
                raise ValueError(f"amax_history {name} {steps} is not from 1 to {MAX_STEPS}")
        if self.algorithm not in ("max", "average"):
            raise ValueError(f"amax_history algorithm {self.algorithm!r} is not max or average")

    @property
    def recorded(self) -> int:
        """Number of steps whose amaxes are recorded, to use them or to count them."""
        return max(self.length, self.just_in_time or 0)

    def earlier(self, entries: Tensor) -> Tensor:
        """Return the amaxes that finished steps give, negative where too few are recorded.

        Args:
            entries: FP32 (..., at least ``recorded``), oldest first, negative where none was
                recorded.
        """
        window = entries[..., -self.length :]
        if self.algorithm == "max":
            amax = window.amax(-1)
        else:
            weight = 2.0 / (self.length + 1)
            amax = torch.full_like(entries[..., 0], _NONE)
            for entry in window.unbind(-1):
                mean = torch.where(amax < 0, entry, amax + (entry - amax) * weight)
                amax = torch.where(entry < 0, amax, mean)
        # Decided on the device: reading the count here would stall a GPU.
        known = (entries[..., -self.recorded :] >= 0).sum(-1)
        return torch.where(known < (self.just_in_time or self.length), _NONE, amax)


class DelayedAmax(NamedTuple):
    """The amax of one operand's tensor scale, from finished steps and from the tensor itself.

    ``earlier`` (FP32 scalar) is what finished steps give, negative where too few are recorded.
    ``step`` is the present step's largest amax so far, which is recorded there; None in evaluation.
    """

    earlier: Tensor
    step: Tensor | None

    def resolve(self, current: Tensor) -> Tensor:
        """Record the tensor's own amax (FP32 scalar); return the one for its scale.

        One that is not finite leaves no trace and is returned itself: a finite scale would make its
        infinities ordinary numbers.
        """
        if self.step is not None:
            finite = current.nan_to_num(nan=_NONE, posinf=_NONE)
            torch.maximum(self.step, finite, out=self.step)
        return torch.where((self.earlier < 0) | ~current.isfinite(), current, self.earlier)


class AmaxHistory:
    """The amaxes of a layer's operands, a row for each: the state of delayed scaling.

    ``entries`` (operands, length) FP32 holds finished steps, newest last; ``step`` (operands,) the
    largest amax seen in the present one. Both are negative where there is none. Within a step a
    scale depends on finished steps only, so the order of microbatches, or computing one twice, does
    not matter.
    """

    def __init__(self, operands: int, length: int, device: torch.device) -> None:
        self._earlier: dict[DelayedScaling, Tensor] = {}
        self.entries = torch.full((operands, length), _NONE, device=device)
        self.step = torch.full((operands,), _NONE, device=device)

    @property
    def entries(self) -> Tensor:
        """Amaxes of finished steps. To be replaced, not written into."""
        return self._entries

    @entries.setter
    def entries(self, entries: Tensor) -> None:
        self._entries = entries
        for rule, amaxes in self._earlier.items():
            amaxes.copy_(rule.earlier(entries))

    @property
    def length(self) -> int:
        """Steps that are kept."""
        return self.entries.shape[1]

    def amax(self, operand: int, rule: DelayedScaling, record: bool = True) -> DelayedAmax:
        """Return the amax of an operand's scale; amaxes of finished steps are computed once."""
        if rule not in self._earlier:
            with torch.inference_mode(False):  # An evaluation may come before training.
                self._earlier[rule] = rule.earlier(self.entries)
        return DelayedAmax(self._earlier[rule][operand], self.step[operand] if record else None)

    def advance(self, step: Tensor) -> None:
        """End the step with the amaxes ``step`` (operands,): its own, reduced over all shards."""
        self.entries = torch.cat([self.entries[:, 1:], step[:, None]], dim=1)
        self.step.fill_(_NONE)  # in place, for CUDA graphs

    def without_record(self) -> "AmaxHistory":
        """Return the same history, but what it records is thrown away."""
        copied = copy(self)
        copied.step = self.step.clone()
        return copied
