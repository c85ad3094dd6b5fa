"""Watching for numbers that went wrong: in gradients, in layers' outputs, and in which data.

A step whose loss or gradient is not finite is not taken. After several in a row the run goes back
to its last checkpoint and leaves out the data of those steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class DataPosition:
    """Where in the endless stream of training samples a run is, and which of them it leaves out.

    ``samples`` counts from the start of the stream. ``bad`` holds half-open ranges of samples, each
    a whole number of global batches as the run met them.
    """

    samples: int = 0
    bad: list[tuple[int, int]] = field(default_factory=list)

    def skip_bad(self) -> bool:
        """Move past bad ranges; whether there was one here."""
        before = self.samples
        while ends := [end for start, end in self.bad if start <= self.samples < end]:
            self.samples = max(ends)
        return self.samples != before


class BadSteps:
    """Counts steps in a row that were not taken, with their data.

    ``limit`` in a row ask to go back; going back twice without one good step in between is futile.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ranges: list[tuple[int, int]] = []
        self.futile = False

    def good(self) -> None:
        """A step was taken."""
        self.ranges.clear()
        self.futile = False

    def bad(self, start: int, end: int) -> None:
        """A step on samples start to end was not taken."""
        self.ranges.append((start, end))

    @property
    def too_many(self) -> bool:
        """Whether to go back now."""
        return len(self.ranges) >= self.limit

    def gone_back(self) -> None:
        """The run is at its last checkpoint again."""
        self.ranges = []
        self.futile = True


def gradients_are_finite(model: Sequence[Any]) -> bool:
    """Whether this rank's main gradients are, over all chunks (wrapped by DistributedDataParallel).

    After the backward pass and its reductions: what one data-parallel rank did wrong is then in the
    sums of the others, or in the shard that one of them holds.
    """
    buffers = [b for chunk in model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = [buffer.grad_data for buffer in buffers if buffer.grad_data.numel()]
    # Of magnitudes or of single values there would be a copy as large as all gradients.
    extremes = [x.float() for grad in gradients for x in (grad.amin(), grad.amax())]
    return bool(torch.stack(extremes).isfinite().all()) if extremes else True


@contextmanager
def output_norms(model: Sequence[torch.nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Collects the L2 norm of each transformer layer's output, by the layer's number from 1.

    While it is open, every forward pass of a layer of this rank adds to the square of its norm.
    """
    squares: dict[int, Tensor] = {}

    def add(layer: TransformerLayer, _: Any, outputs: Any) -> None:
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        square = output.detach().float().square().sum()
        squares[layer.layer_number] = squares.get(layer.layer_number, 0) + square

    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, TransformerLayer)]
    handles = [layer.register_forward_hook(add) for layer in layers]
    norms: dict[int, Tensor] = {}
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()
        norms.update({number: square.sqrt() for number, square in squares.items()})


def outputs_are_finite(iteration: int, norms: dict[int, Tensor]) -> bool:
    """Whether all these norms are; says on this rank which layers' are not."""
    bad = [number for number, norm in sorted(norms.items()) if not norm.isfinite()]
    if bad:
        layers = ", ".join(map(str, bad))
        print(f"iteration {iteration + 1}: output of layer {layers} is not finite", flush=True)
    return not bad
