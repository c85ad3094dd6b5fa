"""Counts of products that were not finite and were computed again in high precision."""

from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lowbit.megatron.layer_state import layer_states
from megatron_lowbit.megatron.quantization_log import write_scalars
from megatron_lowbit.megatron.steps import steps_of
from megatron_lowbit.recipes.precision import GEMM_ROLES

METRIC = "bf16_fallbacks"
"""Start of the names of the metrics; the GEMM's name follows."""


def count_fallbacks(args: Namespace, chunks: list[nn.Module]) -> None:
    """Write the counts of all ranks every ``--log-interval`` iterations, and at the last one.

    They are of the iterations since the last report; what is recomputed in backward counts twice.
    Each rank prints which of its layers they were in.
    """
    config = chunks[0].config

    def begin_step(iteration: int, training: bool) -> None:
        # Megatron-LM sets the function after the model is built.
        if training and not isinstance(config.finalize_model_grads_func, _Finalize):
            finalize = config.finalize_model_grads_func
            config.finalize_model_grads_func = _Finalize(finalize, partial(_report, args, chunks))

    steps_of(args, chunks).listeners.append(begin_step)


class _Finalize:
    """Megatron-LM's function that ends an iteration's backward passes, and a report after it."""

    def __init__(self, finalize: Any, report: Any) -> None:
        self._finalize, self._report = finalize, report

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._finalize(*args, **kwargs)
        self._report()


def _report(args: Namespace, chunks: list[nn.Module]) -> None:
    iteration = args.curr_iteration + 1
    if iteration % args.log_interval and iteration != args.train_iters:
        return
    states = [state for state in layer_states(chunks) if state.fallbacks is not None]
    device = next(chunks[0].parameters()).device
    total = torch.zeros(len(GEMM_ROLES), dtype=torch.int64, device=device)
    for state in states:
        total += state.fallbacks
    if total.any():
        for state in states:
            _print(state, iteration)
            state.fallbacks.zero_()
    dist.all_reduce(total)
    counts = zip(GEMM_ROLES, total.tolist(), strict=True)
    write_scalars({f"{METRIC}/{gemm}": count for gemm, count in counts}, iteration)


def _print(state: Any, iteration: int) -> None:
    for gemm, count in zip(GEMM_ROLES, state.fallbacks.tolist(), strict=True):
        if count:
            print(
                f"rank {dist.get_rank()}, iteration {iteration}: {state.plan.layer.path} {gemm}: "
                f"{count} products were not finite, and were computed again in BF16",
                flush=True,
            )
