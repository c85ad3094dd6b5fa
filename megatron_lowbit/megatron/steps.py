"""The steps of a training loop that is not ours, seen from the model's forward passes.

Megatron-LM's loop has no hook at the start of an iteration. The first forward pass of one is the
same moment: parameters, optimizer and checkpoints of the iteration before are done.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lowbit.megatron.random_key import set_microbatch_key

Listener = Callable[[int, bool], None]


class Steps:
    """Numbers the forward passes of a model's chunks.

    Each training iteration and each evaluation is a step. ``listeners`` are called with the
    iteration (from 0) and with True for training, before the first forward pass of every step.
    """

    def __init__(self, args: Namespace, chunks: Sequence[torch.nn.Module]) -> None:
        self.listeners: list[Listener] = []
        self._args = args
        self._step: tuple[int, bool] | None = None
        self._passes: Counter[int] = Counter()
        for number, chunk in enumerate(chunks):
            chunk.register_forward_pre_hook(lambda module, _, n=number: self._begin(module, n))

    def _begin(self, chunk: torch.nn.Module, number: int) -> None:
        iteration = getattr(self._args, "curr_iteration", 0)
        step = iteration, chunk.training
        if step != self._step:
            self._step = step
            self._passes.clear()
            for listener in self.listeners:
                listener(*step)
        microbatch = self._passes[number]
        self._passes[number] += 1
        if chunk.training:
            # Megatron-LM may run an iteration again to tell bad hardware from bad data: the rerun
            # must draw the same numbers.
            microbatch %= get_num_microbatches()
        set_microbatch_key(self._args.seed, iteration, microbatch)


def steps_of(args: Namespace, chunks: list[Any]) -> Steps:
    """Return the one counter of a model's chunks; make it at the first call."""
    if not hasattr(chunks[0], "lowbit_steps"):
        chunks[0].lowbit_steps = Steps(args, chunks)
    return chunks[0].lowbit_steps
