"""Time of communication: collectives over rings, point to point between pipeline stages.

An all-gather or reduce-scatter of B bytes over n ranks moves B (n - 1) / n over each rank's slowest
link, an all-reduce twice that. Ranks are numbered as Megatron-LM does: tensor-parallel ones next to
each other, then data-parallel ones, then pipeline stages.
"""

from argparse import Namespace
from collections import Counter
from typing import NamedTuple

from megatron_lowbit.planning.compute import BF16, Passes, Seconds, gradient_bytes
from megatron_lowbit.planning.hardware import GPU
from megatron_lowbit.planning.layouts import Layout
from megatron_lowbit.planning.model import Linear, Parameters, Part


class Cluster(NamedTuple):
    """GPUs, so many of them on a host, which NVLink joins."""

    gpu: GPU
    gpus_per_node: int


class Link(NamedTuple):
    """Bytes a second through one rank of a ring, and seconds that any collective takes."""

    bandwidth: float
    latency: float

    def gather(self, count: float, ranks: int) -> float:
        """Time an all-gather or a reduce-scatter of so many bytes, all ranks' together."""
        if ranks == 1:
            return 0.0
        return count * (ranks - 1) / ranks / self.bandwidth + self.latency


def link(cluster: Cluster, ranks: int, stride: int, ring: bool = True) -> Link:
    """Return the link of ``ranks`` GPUs whose numbers are ``stride`` apart.

    Between hosts a ring has the network cards of all its ranks on a host; without ``ring``, as in
    an all-to-all or from point to point, each rank has its own card alone.
    """
    gpu = cluster.gpu
    nvlink = gpu["nvlink_gb_per_s"] * 1e9
    if ranks * stride <= cluster.gpus_per_node:
        return Link(nvlink, gpu["nvlink_latency_us"] * 1e-6)
    cards = max(1, cluster.gpus_per_node // stride) if ring else 1
    network = cards * gpu["network_gb_per_s"] * 1e9
    return Link(min(nvlink, network), gpu["network_latency_us"] * 1e-6)


def part_communication(
    args: Namespace, part: Part, tokens: int, layout: Layout, cluster: Cluster, times: Passes
) -> tuple[Seconds, Seconds]:
    """Time tensor- and expert-parallel communication of one part, forward and backward.

    With sequence parallelism the first layer gathers its input, as codes where it quantizes them,
    in forward and for wgrad, and the second scatters sums; without, it reduces them. The sums of a
    first layer's dgrad overlap wgrad.
    """
    forward, backward = Counter(), Counter()
    ranks = layout.tensor
    if ranks > 1:
        within = link(cluster, ranks, 1)
        whole = tokens * args.hidden_size * BF16
        one = within.gather(whole, ranks)
        if args.sequence_parallel:
            inputs = within.gather(tokens * args.hidden_size * _sent(part.first, "fprop"), ranks)
            again = within.gather(tokens * args.hidden_size * _sent(part.first, "wgrad"), ranks)
            if not part.first.precision.quantized:
                again = max(0.0, again - times.dgrad)
            forward["tensor parallel"] = inputs + one
            backward["tensor parallel"] = one + again + max(0.0, one - times.wgrad)
        else:
            forward["tensor parallel"] = 2 * one
            backward["tensor parallel"] = max(0.0, 2 * one - times.wgrad)
    if part.kind == "experts" and layout.expert > 1:
        between = link(cluster, layout.expert, ranks, ring=False)
        # There and back; each rank sends and receives its own tokens' choices.
        sent = tokens // ranks * args.moe_router_topk * args.hidden_size * BF16
        share = (layout.expert - 1) / layout.expert
        once = sent * share / between.bandwidth + between.latency
        forward["expert parallel"] = backward["expert parallel"] = 2 * once
    return forward, backward


def _sent(linear: Linear, gemm: str) -> float:
    """Return bytes an element of an input that is gathered."""
    quantizer = linear.precision.quantizer(gemm, "input")
    return BF16 if quantizer is None else quantizer.format.bits_per_element / 8


def stage_to_stage(args: Namespace, tokens: int, layout: Layout, cluster: Cluster) -> float:
    """Time a microbatch's activation and its gradient to and from another stage."""
    if layout.pipeline == 1 or layout.virtual > 1:  # interleaved, transfers overlap
        return 0.0
    count = tokens * args.hidden_size * BF16
    if args.sequence_parallel:
        count /= layout.tensor
    between = link(cluster, layout.pipeline, layout.tensor * layout.data, ring=False)
    return 2 * (count / between.bandwidth + between.latency)


class DataParallel(NamedTuple):
    """Seconds a step, before any overlap: summing gradients, gathering parameters."""

    gradients: float
    parameters: float


def data_parallel(
    args: Namespace, count: Parameters, layout: Layout, cluster: Cluster, saved: float = 0.0
) -> DataParallel:
    """Time gradients and BF16 parameters of one rank's part of the model over its replicas.

    ``saved``: bytes by which parameters that are sent as codes are smaller.
    """
    gradients = parameters = 0.0
    for number, ranks, stride in (
        (count.all - count.experts, layout.data, layout.tensor),
        (count.experts, layout.data // layout.expert, layout.tensor * layout.expert),
    ):
        if number == 0 or ranks == 1:
            continue
        joined = link(cluster, ranks, stride)
        gradients += joined.gather(number * gradient_bytes(args), ranks)
        if args.use_distributed_optimizer:
            share = number / count.all
            parameters += joined.gather(number * BF16 - share * saved, ranks)
        else:
            gradients += joined.gather(number * gradient_bytes(args), ranks)
    return DataParallel(gradients, parameters)
