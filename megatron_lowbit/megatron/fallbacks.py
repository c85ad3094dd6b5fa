"""Counts of products that were not finite and were computed again in high precision."""

from argparse import Namespace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from megatron_lowbit.errors import say
from megatron_lowbit.megatron.layer_state import LayerState, layer_states
from megatron_lowbit.megatron.quantization_log import write_scalars
from megatron_lowbit.megatron.steps import run_after_backward, steps_of
from megatron_lowbit.numerics.gemms import GEMM_ROLES

METRIC = "bf16_fallbacks"
"""Start of the names of the metrics; the GEMM's name follows."""


def count_fallbacks(args: Namespace, chunks: list[nn.Module]) -> None:
    """Write the counts of all ranks every ``--log-interval`` iterations, and at the last one.

    They are of the iterations since the last report; what is recomputed in backward counts twice.
    Each rank prints which of its layers they were in.
    """

    def begin_step(iteration: int, training: bool) -> None:
        number = iteration + 1
        if training and (number % args.log_interval == 0 or number == args.train_iters):
            run_after_backward(chunks, partial(_report, chunks, number))

    steps_of(args, chunks).listeners.append(begin_step)


def _report(chunks: list[nn.Module], iteration: int) -> None:
    states = [state for state in layer_states(chunks) if state.fallbacks is not None]
    device = next(chunks[0].parameters()).device
    none = torch.zeros(len(GEMM_ROLES), dtype=torch.int64, device=device)
    total = sum((state.fallbacks for state in states), none)
    if total.any():
        for state in states:
            _print(state, iteration)
            state.fallbacks.zero_()
    dist.all_reduce(total)
    counts = zip(GEMM_ROLES, total.tolist(), strict=True)
    write_scalars({f"{METRIC}/{gemm}": count for gemm, count in counts}, iteration)


def _print(state: LayerState, iteration: int) -> None:
    for gemm, count in zip(GEMM_ROLES, state.fallbacks.tolist(), strict=True):
        if count:
            say(
                f"rank {dist.get_rank()}, iteration {iteration}: {state.plan.layer.path} {gemm}: "
                f"{count} products were not finite, and were computed again in BF16"
            )
