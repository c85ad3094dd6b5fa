"""Time that the CPU takes to launch a step's kernels, and that the GPU waits for it.

Eager torch and megatron-core's own Python take a time that depends on neither the model's width nor
its tokens. It was measured where the GPU had next to nothing to do. CUDA graphs take it away, but
for experts, and for the time that Megatron-LM's loop has the GPU wait between steps.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from megatron_lowbit.planning.compute import experts_of
from megatron_lowbit.planning.hardware import GPU
from megatron_lowbit.planning.layouts import Layout
from megatron_lowbit.planning.model import Linear, Part

_TENSORS = {"attention": 3, "mlp": 3, "experts": 2, "mamba": 8}
"""A part's parameter tensors, with the norm before it; of experts each one's."""
_AROUND = 3
"""Embedding, last norm and output layer."""


class Launches(NamedTuple):
    """Seconds of the CPU: a microbatch's forward and backward pass, and the optimizer's step.

    ``between``: seconds that the GPU waits between steps, whatever the CPU has launched.
    """

    forward: float
    backward: float
    step: float
    between: float


def stage_launches(
    args: Namespace, parts: Counter[Part], layout: Layout, stage: int, gpu: GPU
) -> Launches:
    """Time the CPU of one rank for the parts of its pipeline stage."""
    forward = backward = tensors = 0.0
    for part, number in parts.items():
        experts = experts_of(args, part)
        tensors += number * experts * _TENSORS[part.kind]
        if args.cuda_graph_impl != "none" and part.kind != "experts":
            continue
        grouped = args.moe_grouped_gemm and part.kind == "experts"
        times = number * (1 if grouped else experts)
        linears = sum(_quantized(linear, gpu) for linear in part[1:])
        linears += grouped * experts * len(part[1:]) * gpu["host_us.expert"]
        there, back = _collectives(args, part, layout)
        forward += times * (gpu["host_us.forward"] + linears)
        backward += times * (gpu["host_us.backward"] + linears)
        forward += number * there * gpu["host_us.collective"]
        backward += number * back * gpu["host_us.collective"]
    backward += forward * layout.recomputed_share(stage)
    step = (tensors + _AROUND) * gpu["host_us.tensor"]
    return Launches(1e-6 * forward, 1e-6 * backward, 1e-6 * step, 1e-6 * gpu["host_us.between"])


def _quantized(linear: Linear, gpu: GPU) -> float:
    """Return microseconds that each pass of a linear layer takes longer than in BF16."""
    formats = [one.quantizer.format for one in linear.precision.operands() if one.quantizer]
    if not formats:
        return 0.0
    scaled = any(format.tensor_scaled or format.row_scaled for format in formats)
    return gpu["host_us.quantized"] + scaled * gpu["host_us.tensor_scaled"]


def _collectives(args: Namespace, part: Part, layout: Layout) -> tuple[int, int]:
    """Return collectives of a part's tensor parallelism, forward and backward."""
    if layout.tensor == 1:
        return 0, 0
    if not args.sequence_parallel:
        return 1, 1
    # Codes and scales travel apart.
    inputs = 2 if part.first.precision.quantized else 1
    return inputs + 1, inputs + 2


def repeated(phases: list[tuple[float, float]], times: int) -> list[tuple[float, float]]:
    """Return phases for which :func:`waiting` is the same as for ``times * phases``, but few.

    Seconds from the GPU's work to the CPU's launches change evenly from repetition to repetition,
    so that the first or the last one decides. Those between are one phase.
    """
    if times < 3:
        return times * phases
    cpu, gpu = (float(times - 2) * sum(seconds) for seconds in zip(*phases, strict=True))
    return [*phases, (cpu, gpu), *phases]


def waiting(phases: Iterable[tuple[float, float]]) -> float:
    """Return seconds that a GPU is idle until the CPU has launched what comes next.

    Args:
        phases: what each takes the CPU and the GPU, in order. The GPU ends a phase when it has done
            the work, and not before the last of it was launched; the CPU runs ahead.
    """
    launched = done = busy = 0.0
    for cpu, gpu in phases:
        launched += cpu
        done = max(done + gpu, launched)
        busy += gpu
    return done - busy
