"""Estimate of one layout of a model: parameters, memory, and the time of a step by cause.

Launching a layer takes eager torch and megatron-core a CPU time that depends on neither the model's
width nor its tokens; the GPU waits for it where it has little work. CUDA graphs remove this time,
except for experts and for what the loop of Megatron-LM takes between steps.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import megatron_lowbit.cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.training.training import num_floating_point_operations
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_lowbit.planning.compute import Passes, gradient_bytes, head_times, part_times
from megatron_lowbit.planning.device import BF16, Device
from megatron_lowbit.planning.hardware import GPU
from megatron_lowbit.planning.layouts import Layout
from megatron_lowbit.planning.memory import Memory, rank_memory, saved_parameter_bytes
from megatron_lowbit.planning.model import (
    Linear,
    Parameters,
    Part,
    local_tokens,
    output_layer,
    parameters,
    replicas,
    tokens_of,
)
from megatron_lowbit.recipes import Recipe

WAITING = "waiting for the CPU"
BUBBLE = "pipeline bubble"
_ADAM_BYTES = 46
"""Bytes per parameter that an optimizer's step moves: 12 for the gradient's norm and clipping, 28
for Transformer Engine's fused Adam, 6 for the copy to the BF16 parameter."""
_UNSHARDED_BYTES = 8
"""Bytes per parameter that every rank moves: the gradient set to zero and searched for NaN."""
_TENSORS = {"attention": 3, "mlp": 3, "experts": 2, "mamba": 8}
"""Parameter tensors of a part, with the norm before it; for experts, of each expert."""


class Estimate(NamedTuple):
    """Figures of a layout. ``seconds`` of a step on the slowest stage's GPUs, by what takes them.

    ``args``: training arguments of that layout. ``parameters`` and ``memory``: one entry for the
    ranks of each pipeline stage.
    """

    layout: Layout
    args: Namespace
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
        """Tokens/s of all GPUs together."""
        return self.tokens / self.step

    @property
    def gpus(self) -> int:
        """Ranks of the layout."""
        return self.layout.tensor * self.layout.pipeline * replicas(self.args)

    def utilisation(self, device: Device) -> float:
        """Return model FLOPs over what the GPUs' BF16 tensor cores could do by the data sheet."""
        peak = self.gpus * device.gpu["peak_bf16"] * 1e12
        return self.model_flops / self.step / peak


def estimate(
    layout: Layout, args: Namespace, stages: list[Counter[Part]], recipe: Recipe, vocabulary: int,
    device: Device,
) -> Estimate:  # fmt: skip
    """Estimate the figures of a layout, in which training has these arguments.

    ``stages``: parts of each pipeline stage, where equal stages are the same object.
    ``vocabulary`` is without padding.
    """
    padded = padded_vocabulary(args, vocabulary, layout.tensor)
    head = output_layer(args, recipe, padded)
    alike: dict[tuple[int, ...], tuple[Parameters, Passes]] = {}
    counts, times, memory = [], [], []
    for stage, parts in enumerate(stages):
        first, last = stage == 0, stage == layout.pipeline - 1
        key = id(parts), first, last, layout.recomputed_layers(stage)
        if key not in alike:
            count = parameters(args, parts, padded, first, last)
            alike[key] = count, _stage_times(args, parts, layout, stage, head, device)
        count, passes = alike[key]
        counts.append(count)
        times.append(passes)
        memory.append(rank_memory(args, parts, count, layout, stage, head, device))
    seconds = _step(args, stages, times, counts, layout, device)
    tokens = replicas(args) * layout.microbatches * tokens_of(args)
    counted = Namespace(**vars(args) | {"padded_vocab_size": padded})
    flops = num_floating_point_operations(counted, tokens // args.seq_length)
    return Estimate(layout, args, counts, memory, seconds, tokens, flops)


def padded_vocabulary(args: Namespace, vocabulary: int, tensor: int) -> int:
    """Return the size of a vocabulary as so many tensor-parallel ranks pad it."""
    divisor = args.make_vocab_size_divisible_by
    return int(calculate_padded_vocab_size(vocabulary, divisor, tensor, logging_enabled=False))


def _stage_times(
    args: Namespace, parts: Counter[Part], layout: Layout, stage: int, head: Linear, device: Device
) -> Passes:
    """Time one microbatch in one stage, and what it does once a step."""
    passes = Passes.none()
    for part, number in parts.items():
        passes.add(part_times(args, part, device), number)
    if layout.recomputed:
        recomputed = passes.forward.total() * layout.recomputed_share(stage)
        passes.backward["recomputation"] = recomputed
    if stage == 0:
        # The embedding's dense gradient is set to zero, written, and added to the main gradient.
        passes.backward["elementwise"] += device.moved(14 * head.weights)
    if stage == layout.pipeline - 1:
        passes.add(head_times(args, head, device))
    if layout.pipeline > 1 and layout.virtual == 1:  # interleaved, transfers overlap
        sent = local_tokens(args) * args.hidden_size * BF16
        link = device.link(layout.pipeline, layout.tensor * replicas(args), ring=False)
        passes.backward["pipeline transfers"] = 2 * link.send(sent)
    return passes


def _step(
    args: Namespace, stages: list[Counter[Part]], times: list[Passes], counts: list[Parameters],
    layout: Layout, device: Device,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of a step by cause, as the slowest stage sees them.

    Under 1F1B the first microbatch passes all stages, the others follow at the slowest one's pace;
    with virtual stages (arXiv 2104.04473, section 2.2) others fill what they wait for.
    """
    totals = [passes.forward.total() + passes.backward.total() for passes in times]
    slowest = max(range(len(times)), key=totals.__getitem__)
    forward, backward, once = times[slowest]
    parts, count = stages[slowest], counts[slowest]
    seconds = (forward + backward) * layout.microbatches
    seconds[BUBBLE] = (sum(totals) - totals[slowest]) / layout.virtual
    seconds.add(once)
    gradients, gathers = data_parallel(args, count, device, saved_parameter_bytes(args, parts))
    hidden = backward.total() if args.overlap_grad_reduce else 0.0
    overlaps = args.overlap_param_gather and not args.quantized_param_gather
    overlapped = forward.total() if overlaps else 0.0
    seconds["data parallel"] = max(0.0, gradients - hidden) + max(0.0, gathers - overlapped)
    there, back, step = _launches(args, parts, layout.recomputed_share(slowest), device.gpu)
    phases = repeated([(there, forward.total()), (back, backward.total())], layout.microbatches)
    if device.accumulate:
        largest = max(count.all for count in counts)
        shards = replicas(args) if args.use_distributed_optimizer else 1
        moved = largest * (_UNSHARDED_BYTES + _ADAM_BYTES / shards)
        seconds["optimizer"] = device.moved(moved)
        phases.append((step, seconds["optimizer"]))
        seconds[WAITING] = 1e-6 * device.gpu["host_us.between"]
    seconds[WAITING] += waiting(phases)
    return {name: value for name, value in seconds.items() if value > 0}


def data_parallel(
    args: Namespace, count: Parameters, device: Device, saved: float = 0.0
) -> tuple[float, float]:
    """Time sums of gradients and gathers of BF16 parameters over the replicas, without overlap.

    ``count``: parameters of one rank. ``saved``: bytes by which parameters that are sent as codes
    are smaller.
    """
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    gradients = gathers = 0.0
    for number, ranks, stride in (
        (count.all - count.experts, replicas(args), tensor),
        (count.experts, replicas(args) // expert, tensor * expert),
    ):
        if number == 0:
            continue
        link = device.link(ranks, stride)
        once = link.gather(number * gradient_bytes(args), ranks)
        gradients += once if args.use_distributed_optimizer else 2 * once
        if args.use_distributed_optimizer:
            gathers += link.gather(number * BF16 - number / count.all * saved, ranks)
    return gradients, gathers


def _launches(
    args: Namespace, parts: Counter[Part], recomputed: float, gpu: GPU
) -> tuple[float, float, float]:
    """Time the CPU of a rank: a microbatch's forward and backward pass, and the optimizer's step.

    ``recomputed``: share of the stage's layers.
    """
    forward = backward = tensors = 0.0
    for part, number in parts.items():
        experts = part.experts
        tensors += number * experts * _TENSORS[part.name]
        if args.cuda_graph_impl != "none" and part.name != "experts":
            continue
        linears = sum(_quantized_us(linear, gpu) for linear in part.linears)
        times = experts
        if args.moe_grouped_gemm and part.name == "experts":
            times = 1
            linears += experts * len(part.linears) * gpu["host_us.expert"]
        there = back = 1 if args.tensor_model_parallel_size > 1 else 0
        if there and args.sequence_parallel:
            # Codes and scales are gathered separately.
            there = 3 if part.first.precision.quantized else 2
            back = there + 1
        for_each = gpu["host_us.collective"]
        forward += number * (times * (gpu["host_us.forward"] + linears) + there * for_each)
        backward += number * (times * (gpu["host_us.backward"] + linears) + back * for_each)
    tensors += 3  # embedding, last norm and output layer
    step = tensors * gpu["host_us.tensor"]
    return 1e-6 * forward, 1e-6 * (backward + forward * recomputed), 1e-6 * step


def _quantized_us(linear: Linear, gpu: GPU) -> float:
    """Return microseconds that each pass of a linear layer takes longer than in BF16."""
    formats = [operand.quantizer.format for operand in linear.precision.operands()
               if operand.quantizer]  # fmt: skip
    if not formats:
        return 0.0
    scaled = any(format.tensor_scaled or format.row_scaled for format in formats)
    return gpu["host_us.quantized"] + scaled * gpu["host_us.tensor_scaled"]


def repeated(phases: list[tuple[float, float]], times: int) -> list[tuple[float, float]]:
    """Return few phases for which :func:`waiting` is the same as for ``times * phases``.

    Seconds from the GPU's work to the CPU's launches change evenly from repetition to repetition,
    so that the first or the last one decides. Those between are one phase.
    """
    if times < 3:
        return times * phases
    cpu, gpu = (float(times - 2) * sum(seconds) for seconds in zip(*phases, strict=True))
    return [*phases, (cpu, gpu), *phases]


def waiting(phases: Iterable[tuple[float, float]]) -> float:
    """Return seconds that a GPU is idle until the CPU has launched what comes next.

    ``phases``: what each takes the CPU and the GPU, in order. The GPU ends a phase when it has done
    the work, and not before the last of it was launched; the CPU runs ahead.
    """
    launched = done = busy = 0.0
    for cpu, gpu in phases:
        launched += cpu
        done = max(done + gpu, launched)
        busy += gpu
    return done - busy
