"""Cross-entropy of each token, forward and backward: Megatron-LM's, liger-kernel's, this project's.

    python -m benchmarks loss            4096 tokens of Llama 3's vocabulary, BF16
    python -m benchmarks loss --sweep    three more sizes, one with rows that are not aligned

Bytes of a logit are those that plans count; the bound is the time of a copy that moves as many. A
step's logits are the gradient of the step before where that takes their place.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import runner, timing
from benchmarks.timing import Ceilings
from megatron_lowbit.arguments.parser import LOSSES
from megatron_lowbit.megatron.loss import cross_entropy_by
from megatron_lowbit.planning.compute import LOSS_BYTES


class Size(NamedTuple):
    """Size of the logits."""

    tokens: int
    vocabulary: int


SIZES = [Size(4096, 128256), Size(16384, 128256), Size(8192, 32000), Size(4096, 50257)]
BYTES = {name or "unfused": sum(moved) for name, moved in LOSS_BYTES.items()}
"""Bytes of a BF16 logit by contender."""


def cross_entropy_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a contender's losses of logits and labels, by one process."""
    if name in LOSSES:
        cross_entropy = cross_entropy_by(name)
        return lambda logits, labels: cross_entropy(logits, labels, None)
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if name == "native":
        from megatron.core.fusions.fused_cross_entropy import (
            fused_vocab_parallel_cross_entropy as f,
        )
    else:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as f
    return partial(f, tp_group=dist.group.WORLD)


def step_of(size: Size, name: str) -> timing.Step:
    """Return a step that computes losses and the gradient of their sum."""
    device, cross_entropy = timing.device(), cross_entropy_of(name)
    logits = torch.randn(size.tokens, 1, size.vocabulary, device=device, dtype=torch.bfloat16)
    labels = torch.randint(size.vocabulary, (size.tokens, 1), device=device)
    grads = torch.ones(size.tokens, 1, device=device)
    logits.requires_grad_()

    def step(mark: timing.Mark) -> None:
        losses = cross_entropy(logits, labels)
        mark()
        torch.autograd.grad(losses, logits, grads)

    return step


def run(size: Size, names: Sequence[str], limits: Ceilings, seconds: float) -> list[dict]:
    """Measure one size."""

    def row(name: str, laps: list[list[float]]) -> dict:
        times, moved = timing.phases(laps), BYTES[name] * size.tokens * size.vocabulary
        rate, bound = moved / times["both"]["median_ms"] / 1e9, 1e3 * moved / limits.copy
        figures = {"bound_ms": bound, "bytes_a_logit": BYTES[name], "tb_per_s": rate}
        return times | {key: round(figure, 4) for key, figure in figures.items()}

    builders = {name: partial(step_of, size, name) for name in names}
    return runner.rows_of(builders, row, {"size": size}, seconds)


COLUMNS = {
    "forward ms": "forward", "backward ms": "backward", "ms": "both", "bound": "bound_ms",
    "bytes per logit": "bytes_a_logit", "TB/s": "tb_per_s",
}  # fmt: skip
main = runner.over_sizes("loss", __doc__, BYTES, SIZES, run, COLUMNS)
