"""One training iteration and one evaluation, by megatron-core's pipeline schedules."""

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lowbit.megatron import amax_history
from megatron_lowbit.megatron.layer_state import forget_quantized_weights
from megatron_lowbit.training.distributed import all_ranks, set_iteration_seed, set_step
from megatron_lowbit.training.sentinels import (
    gradients_are_finite,
    output_norms,
    outputs_are_finite,
)
from megatron_lowbit.training.timers import PhaseTimer

Batches = Iterator[dict[str, Tensor]]


class StepResult(NamedTuple):
    """Mean loss of the global batch, gradient norm, and whether the update was taken.

    If it was not, loss or gradient were not finite, and the norm is NaN.
    """

    loss: float
    grad_norm: float
    taken: bool


def train_step(
    args: Namespace,
    iteration: int,
    batches: Batches | list[Batches],
    model,
    optimizer,
    scheduler,
    timer: PhaseTimer,
    after_backward: Callable[[int, list], None] | None = None,
    check_outputs: bool = False,
    watch: AbstractContextManager | None = None,
) -> StepResult:
    """Forward, backward and, if loss and gradients are finite on all ranks, the update.

    ``after_backward`` is called with the iteration and the model before gradients are looked at.
    ``check_outputs`` takes the norms of all layers' outputs and names those that are not finite;
    ``watch`` is open during forward and backward.
    """
    optimizer.zero_grad()
    watched = output_norms(model) if check_outputs else nullcontext({})
    with timer.phase("forward_backward"), watched as norms, watch or nullcontext():
        loss = forward_backward(args, iteration, batches, model)
    if after_backward is not None:
        after_backward(iteration, model)
    finite = outputs_are_finite(iteration, norms) and gradients_are_finite(model)
    taken = all_ranks(math.isfinite(loss) and finite)
    with timer.phase("optimizer"):
        grad_norm = optimizer.step()[1] if taken else math.nan
    forget_quantized_weights(model)
    amax_history.end_step(model)
    scheduler.step(increment=args.global_batch_size)
    return StepResult(loss, float(grad_norm or 0.0), taken)


def forward_backward(
    args: Namespace, iteration: int, batches: Batches | list[Batches], model
) -> float:
    """The mean loss of a global batch; its gradients are then in the model's buffers."""
    for chunk in model:
        chunk.zero_grad_buffer()
    set_iteration_seed(args.seed, iteration)
    return _mean_loss(_run_schedule(args, iteration, batches, model, forward_only=False))


@torch.no_grad()
def evaluate(
    args: Namespace,
    iteration: int,
    make_batches: Callable[[], Batches | list[Batches]],
    model,
    before_batch: Callable[[], None],
) -> float:
    """Mean loss of the same ``eval_iters`` global batches at every call."""
    for chunk in model:
        chunk.eval()
    batches = make_batches()
    losses = []
    for _ in range(args.eval_iters):
        before_batch()
        losses += _run_schedule(args, iteration, batches, model, forward_only=True)
    for chunk in model:
        chunk.train()
    return _mean_loss(losses)


def _run_schedule(
    args: Namespace, iteration: int, batches: Batches | list[Batches], model, forward_only: bool
) -> list[dict[str, Tensor]]:
    """All microbatches of one global batch; each one's loss on the last pipeline stage."""
    seen: Counter[int] = Counter()

    def forward_step(data: Batches, chunk):
        # Interleaved stages run a microbatch once on each chunk: every chunk counts its own.
        set_step(args.seed, iteration, seen[id(chunk)])
        seen[id(chunk)] += 1
        batch = {key: value.to(_device(), non_blocking=True) for key, value in next(data).items()}
        token_losses = chunk(
            batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"]
        )
        return token_losses, partial(_masked_mean, batch["loss_mask"])

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )


def _masked_mean(loss_mask: Tensor, token_losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss of a microbatch's tokens, and a copy to report: the schedule divides in place."""
    mask = loss_mask.flatten().float()
    loss = torch.sum(token_losses.flatten().float() * mask) / mask.sum()
    return loss, {"lm_loss": loss.detach().clone()}


def _mean_loss(losses: list[dict[str, Tensor]]) -> float:
    """Mean over microbatches and data-parallel ranks, known to every rank of the world."""
    total = torch.zeros(2, dtype=torch.float64, device=_device())
    if losses:
        total[0] = torch.stack([loss["lm_loss"].double() for loss in losses]).sum()
        total[1] = len(losses)
    # Tensor-parallel ranks hold the same losses and weigh the same.
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _device() -> torch.device | int:
    return torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu")


def data_parallel_size() -> int:
    """Ranks that see different data."""
    return parallel_state.get_data_parallel_world_size()
