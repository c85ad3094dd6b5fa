"""Steps of Megatron-LM's training loop, detected by the forward passes of the model.

Megatron-LM's loop has no hook at the beginning of an iteration. At the first forward pass of an
iteration, the optimizer step and the checkpoint of the previous iteration are complete.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lowbit.megatron.random_key import set_microbatch_key


class Steps:
    """Counter of the forward passes of a model's chunks.

    Each training iteration and each evaluation is a step. Before the first forward pass of every
    step, the counter calls its listeners. Before every forward pass, it sets the random key of the
    microbatch.

    Attributes:
        listeners: functions of the iteration (from 0), and of True for training.
        before_pass: functions to call once the random key of a microbatch is set.
    """

    def __init__(self, args: Namespace, chunks: Sequence[torch.nn.Module]) -> None:
        self.listeners: list[Callable[[int, bool], None]] = []
        self.before_pass: list[Callable[[], None]] = []
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
            # Megatron-LM may rerun an iteration to distinguish bad hardware from bad data. The
            # rerun must draw the same random numbers.
            microbatch %= get_num_microbatches()
        set_microbatch_key(self._args.seed, iteration, microbatch)
        for function in self.before_pass:
            function()


def steps_of(args: Namespace, chunks: list[Any]) -> Steps:
    """Return the counter of a model's chunks; the first call creates it."""
    if not hasattr(chunks[0], "lowbit_steps"):
        chunks[0].lowbit_steps = Steps(args, chunks)
    return chunks[0].lowbit_steps


def run_after_backward(chunks: Sequence[Any], function: Callable[[], None]) -> None:
    """Call a function once, when Megatron-LM has finalized the present iteration's gradients."""
    # The one public hook that runs on all ranks once an iteration's backward passes are done.
    # Megatron-LM sets it after the model is built.
    config = chunks[0].config
    finalize = config.finalize_model_grads_func

    def finalize_and_run(*args: Any, **kwargs: Any) -> None:
        config.finalize_model_grads_func = finalize
        finalize(*args, **kwargs)
        function()

    config.finalize_model_grads_func = finalize_and_run
