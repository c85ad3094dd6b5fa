"""Steps of Megatron-LM's training loop and random keys of microbatches, by the forward passes.

Megatron-LM's loop has no hook at the beginning of an iteration. At the first forward pass of an
iteration, the optimizer step and the checkpoint of the previous iteration are complete.

Layers derive their random keys from the microbatch's key, a function of seed, iteration and
microbatch, so that a resumed, resharded or recomputed run draws the same bits. The key is the seed
of torch's default CPU generator: activation recomputation restores that generator, and with it the
key of the microbatch that it repeats. The generator's draws stay as they are, so that dropout is
the same with recipes and without.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lowbit.cpu_runtime.megatron_patches import with_seed
from megatron_lowbit.numerics import randomness

_expert_keys: dict[int, int] = {}
"""Keys of experts by the keys of other layers, for the microbatches of the present step."""


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
            if args.overlap_moe_expert_parallel_comm:
                self._begin_with_plan(chunk, number)

    def _begin_with_plan(self, chunk: Any, number: int) -> None:
        """Begin a pass, too, where a chunk builds the plan that runs it in parts.

        Megatron-LM runs all forward parts of a micro batch before it builds the next one's plan.
        """
        build = chunk.build_schedule_plan

        def build_schedule_plan(*args: Any, **kwargs: Any) -> Any:
            self._begin(chunk, number)
            return build(*args, **kwargs)

        chunk.build_schedule_plan = build_schedule_plan

    def _begin(self, chunk: torch.nn.Module, number: int) -> None:
        iteration = getattr(self._args, "curr_iteration", 0)
        step = iteration, chunk.training
        if step != self._step:
            self._step = step
            self._passes.clear()
            _expert_keys.clear()
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


def set_microbatch_key(seed: int, iteration: int, microbatch: int) -> None:
    """Set the random keys of this rank's forward pass of a microbatch.

    ``iteration``, and ``microbatch`` within it and on this rank, count from 0. Data-parallel ranks
    number the microbatches of a global batch in turn: the same microbatches have the same keys in
    every layout. Context-parallel ranks, which hold other tokens of the same sequences, have keys
    of their own.

    Experts have other keys: one sees the tokens of all ranks of its group, and is split over other
    ranks than a dense layer if the sizes of tensor parallelism differ.
    """
    number = microbatch * parallel_state.get_data_parallel_world_size()
    number += parallel_state.get_data_parallel_rank()
    context = parallel_state.get_context_parallel_rank()
    key = randomness.microbatch_key(seed, iteration, number, context)
    replicas = parallel_state.get_expert_data_parallel_world_size()
    expert_number = microbatch * replicas + parallel_state.get_expert_data_parallel_rank()
    _expert_keys[key] = randomness.microbatch_key(seed, iteration, expert_number)
    torch.set_rng_state(with_seed(torch.get_rng_state(), key))


def microbatch_key(is_expert: bool) -> int:
    """Return the key of the present microbatch for an expert, or for any other layer."""
    key = torch.initial_seed()
    return _expert_keys.get(key, key) if is_expert else key
