"""Estimate of one layout of a model: parameters, memory, and the time of a step by cause.

Eager torch and megatron-core's Python take the CPU a time that depends on neither the model's width
nor its tokens; the GPU waits for it where it has little to do. It was measured there. CUDA graphs
take it away, but for experts, and for the time that Megatron-LM's loop has the GPU wait between
steps.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import megatron_lowbit.cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.training.training import num_floating_point_operations
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_lowbit.planning import communication, compute
from megatron_lowbit.planning.compute import experts_of
from megatron_lowbit.planning.hardware import GPU
from megatron_lowbit.planning.layouts import Layout
from megatron_lowbit.planning.memory import Memory, rank_memory, saved_parameter_bytes
from megatron_lowbit.planning.model import Linear, Parameters, Part, parameters

_T = TypeVar("_T")
_ADAM_BYTES = 46
"""Bytes a parameter that an optimizer's step moves: 12 for the gradient's norm and clipping, 28 for
Transformer Engine's fused Adam, 6 for the copy to the BF16 parameter."""
_WHOLE_BYTES = 8
"""Bytes a parameter that every rank moves: the gradient set to zero and searched for NaN."""
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


class Estimate(NamedTuple):
    """A layout's figures. ``seconds`` of a step on the slowest stage's GPUs, by what takes them.

    ``parameters`` and ``memory`` are those of each pipeline stage's ranks.
    """

    layout: Layout
    parameters: list[Parameters]
    memory: list[Memory]
    seconds: dict[str, float]
    tokens: int
    model_flops: int

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def most_memory(self) -> float:
        """Bytes of the rank that needs most."""
        return max(memory.total for memory in self.memory)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all GPUs together."""
        return self.tokens / self.step

    @property
    def gpus(self) -> int:
        """Ranks of the layout."""
        return self.layout.tensor * self.layout.pipeline * self.layout.data

    def utilisation(self, device: compute.Device) -> float:
        """Return model FLOPs over what the GPUs' BF16 tensor cores could do by the data sheet."""
        peak = self.gpus * device.gpu["peak_bf16"] * 1e12
        return self.model_flops / self.step / peak


def estimate(
    args: Namespace, stages: list[Counter[Part]], layout: Layout, vocabulary: int,
    device: compute.Device, cluster: communication.Cluster,
) -> Estimate:  # fmt: skip
    """Estimate the figures of a layout.

    Args:
        args: training's arguments in that layout.
        stages: what each pipeline stage is made of.
        layout: the same layout.
        vocabulary: the tokenizer's size, without padding.
        device: the GPU and what runs on it.
        cluster: how GPUs are joined.
    """
    padded = padded_vocabulary(args, vocabulary, layout.tensor)
    kinds = [
        (id(parts), ends(stage, layout.pipeline), layout.recomputed_layers(stage))
        for stage, parts in enumerate(stages)
    ]
    first = [kinds.index(kind) for kind in kinds]

    def each(compute_stage: Callable[[int], _T]) -> list[_T]:
        """Compute something of every stage, once for stages that are alike."""
        made = {stage: compute_stage(stage) for stage in set(first)}
        return [made[stage] for stage in first]

    counts = each(
        lambda stage: parameters(
            args, stages[stage], padded, layout.tensor, layout.expert, kinds[stage][1]
        )
    )
    memory = [
        rank_memory(args, parts, count, layout, stage, padded, device)
        for stage, (parts, count) in enumerate(zip(stages, counts, strict=True))
    ]
    times = each(
        lambda stage: _stage_times(args, stages[stage], layout, stage, padded, device, cluster)
    )
    launches = each(lambda stage: stage_launches(args, stages[stage], layout, stage, device.gpu))
    saved = each(lambda stage: saved_parameter_bytes(args, stages[stage], layout.tensor))
    seconds = _step(args, times, launches, counts, saved, layout, device, cluster)
    tokens = layout.data * layout.microbatches * layout.micro_batch * args.seq_length
    counted = Namespace(**vars(args) | {"padded_vocab_size": padded})
    flops = num_floating_point_operations(counted, tokens // args.seq_length)
    return Estimate(layout, counts, memory, seconds, tokens, flops)


def padded_vocabulary(args: Namespace, vocabulary: int, tensor: int) -> int:
    """Return the size of a vocabulary as so many tensor-parallel ranks pad it."""
    divisor = args.make_vocab_size_divisible_by
    return calculate_padded_vocab_size(vocabulary, divisor, tensor, logging_enabled=False)


def ends(stage: int, pipeline: int) -> str:
    """Return which ends of the model a stage has."""
    return " ".join(["first"] * (stage == 0) + ["last"] * (stage == pipeline - 1))


def _stage_times(
    args: Namespace, parts: Counter[Part], layout: Layout, stage: int, vocabulary: int,
    device: compute.Device, cluster: communication.Cluster,
) -> compute.Passes:  # fmt: skip
    """Time one microbatch in one stage, and what it does once a step."""
    tokens = layout.micro_batch * args.seq_length
    forward, backward, step = Counter(), Counter(), Counter()
    for part, number in parts.items():
        times = compute.part_times(args, part, tokens, device)
        there, back = communication.part_communication(args, part, tokens, layout, cluster, times)
        found = (times.forward + there, times.backward + back, times.step)
        for sums, more in zip((forward, backward, step), found, strict=True):
            for name, seconds in more.items():
                sums[name] += number * seconds
    if layout.recomputed:
        backward["recomputation"] = forward.total() * layout.recomputed_share(stage)
    which = ends(stage, layout.pipeline)
    if "first" in which:
        backward += compute.embedding_times(args, vocabulary, device).backward
    if "last" in which:
        head = compute.head_times(args, vocabulary, tokens, device)
        forward, backward = forward + head.forward, backward + head.backward
    backward["pipeline transfers"] = communication.stage_to_stage(args, tokens, layout, cluster)
    return compute.Passes(forward, backward, step)


def _step(
    args: Namespace, times: list[compute.Passes], launches: list[Launches],
    counts: list[Parameters], saved: list[float], layout: Layout, device: compute.Device,
    cluster: communication.Cluster,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of a step by cause, as the slowest stage sees them.

    Under 1F1B the first microbatch passes all stages, the others follow at the slowest one's pace;
    with virtual stages (arXiv 2104.04473, section 2.2) others fill what they wait for.
    """
    totals = [passes.forward.total() + passes.backward.total() for passes in times]
    slowest = max(range(len(times)), key=totals.__getitem__)
    passes = times[slowest]
    found: compute.Seconds = Counter()
    for name, seconds in (passes.forward + passes.backward).items():
        found[name] += layout.microbatches * seconds
    found["pipeline bubble"] = (sum(totals) - totals[slowest]) / layout.virtual
    found += passes.step
    sent = communication.data_parallel(args, counts[slowest], layout, cluster, saved[slowest])
    hidden = passes.backward.total() if args.overlap_grad_reduce else 0.0
    overlaps = args.overlap_param_gather and not args.quantized_param_gather
    ahead = passes.forward.total() if overlaps else 0.0
    found["data parallel"] = max(0.0, sent.gradients - hidden) + max(0.0, sent.parameters - ahead)
    if device.accumulate:
        most = max(count.all for count in counts)
        shards = layout.data if args.use_distributed_optimizer else 1
        found["optimizer"] = device.moved(most * (_WHOLE_BYTES + _ADAM_BYTES / shards))
    cpu = launches[slowest]
    microbatch = [(cpu.forward, passes.forward.total()), (cpu.backward, passes.backward.total())]
    step = [(cpu.step, found["optimizer"])] if device.accumulate else []
    found["waiting for the CPU"] = waiting(repeated(microbatch, layout.microbatches) + step)
    if device.accumulate:
        found["waiting for the CPU"] += cpu.between
    return {name: seconds for name, seconds in found.items() if seconds > 0}
