"""Memory of one rank: what stays, what forward keeps, and the moment at which most is allocated."""

from argparse import Namespace
from collections import Counter
from typing import NamedTuple

from megatron_lowbit.planning import compute
from megatron_lowbit.planning.activation_memory import activation_bytes, quantized_weight_bytes
from megatron_lowbit.planning.layouts import Layout
from megatron_lowbit.planning.model import Linear, Parameters, Part
from megatron_lowbit.planning.routing import takes_values


class Memory(NamedTuple):
    """Bytes of one rank at its peak, by what they are of, and which moment that is."""

    parts: dict[str, float]
    moment: str

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def usable_bytes(device: compute.Device) -> float:
    """Return the bytes of a GPU's memory that torch's tensors may fill."""
    return (device.gpu["memory_gib"] - device.gpu["reserve_gib"]) * 2**30


def state(args: Namespace, count: Parameters, layout: Layout) -> dict[str, float]:
    """Return bytes of weights, gradients and optimizer: 18 per parameter, 12 of them sharded.

    Each parameter is BF16 (megatron-core's Float16Module), with an FP32 main parameter and two
    moments. The precision-aware optimizer keeps moments in the given formats, and of an FP32 main
    parameter the 16 bits that the BF16 one lacks, unless codes take the BF16 one's place.
    """
    each = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    each += args.main_params_dtype.itemsize
    if args.use_precision_aware_optimizer and args.main_params_dtype.itemsize == compute.FP32:
        each -= 0 if args.quantized_param_gather else compute.BF16
    optimizer = 0.0
    for number, ranks in (
        (count.all - count.experts, layout.data),
        (count.experts, layout.data // layout.expert),
    ):
        shards = ranks if args.use_distributed_optimizer else 1
        optimizer += each * number / shards
    return {
        "weights": compute.BF16 * count.all,
        "main gradients": compute.gradient_bytes(args) * count.all,
        "optimizer": optimizer,
    }


def stores_codes(args: Namespace, linear: Linear) -> bool:
    """Return True if codes take the place of a layer's BF16 weight."""
    precision = linear.precision
    stored = precision.quantized and precision.storage_obstacle is None
    return bool(args.quantized_param_gather) and stored


def saved_parameter_bytes(args: Namespace, parts: Counter[Part], tensor: int) -> float:
    """Return the bytes by which a rank's weights are smaller as codes, where they are sent so."""
    saved = 0.0
    for part, number in parts.items():
        for linear in part[1:]:
            if stores_codes(args, linear) and linear.precision.weight_in_one_set:
                quantizer = linear.precision.fprop.rhs
                each = compute.BF16 - quantizer.format.bits_per_element / 8 if quantizer else 0.0
                saved += number * compute.experts_of(args, part) * each * linear.elements(tensor)
    return saved


def in_flight(layout: Layout, stage: int) -> float:
    """Return microbatches whose activations a stage holds at once, under the 1F1B schedule.

    With virtual stages (arXiv 2104.04473) chunks warm up, of which ``virtual`` are a microbatch.
    """
    stages, virtual = layout.pipeline, layout.virtual
    if virtual == 1:
        return min(layout.microbatches, stages - stage)
    warm = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(layout.microbatches, warm / virtual)


def rank_memory(
    args: Namespace, parts: Counter[Part], count: Parameters, layout: Layout, stage: int,
    vocabulary: int, device: compute.Device,
) -> Memory:  # fmt: skip
    """Estimate the peak of a rank in one pipeline stage; ``vocabulary`` is padded."""
    tokens, tensor = layout.micro_batch * args.seq_length, layout.tensor
    held = Counter(state(args, count, layout))
    if not device.accumulate:
        held = Counter(weights=held["weights"])
    microbatch: Counter[str] = Counter()
    for part, number in parts.items():
        times = compute.experts_of(args, part)
        for linear in part[1:]:
            as_values = takes_values(device.gemm(linear.precision, "fprop"))
            stored = stores_codes(args, linear)
            step, each = quantized_weight_bytes(linear, tensor, as_values, stored)
            if stored:
                held["weights"] -= number * times * compute.BF16 * linear.elements(tensor)
            held["quantized weights"] += number * times * step
            microbatch["quantized weights"] += number * times * each
        for name, size in activation_bytes(args, part, tokens, device.scan).items():
            microbatch[name] += number * size
    local = tokens // tensor if args.sequence_parallel else tokens
    stream = local * args.hidden_size * compute.BF16
    share = layout.recomputed_share(stage)
    again: Counter[str] = Counter()
    if share:
        # The layers that are recomputed keep their input; one of them at a time all the rest.
        again = Counter({name: size / layout.layers(stage) for name, size in microbatch.items()})
        microbatch = Counter({name: size * (1 - share) for name, size in microbatch.items()})
        microbatch["recomputed layers' inputs"] = layout.recomputed_layers(stage) * stream
    copies = in_flight(layout, stage)
    held_by_all = Counter({name: copies * size for name, size in microbatch.items()})
    moments = {
        "backward of a layer": held + held_by_all + again + _layer_backward(args, parts, device),
    }
    if stage == layout.pipeline - 1:
        columns = vocabulary // tensor
        # The final norm's input and output.
        # Cross-entropy, fused or not, copies BF16 logits to FP32, and back in the backward pass.
        head = Counter({"logits": tokens * columns * (compute.BF16 + compute.FP32)})
        head["working memory"] = 2 * stream
        moments["loss"] = held + held_by_all + head
        # The gradients of the logits, of the norm's output and of the table.
        head = Counter({"logits": tokens * columns * compute.BF16})
        head["working memory"] = 3 * stream + columns * args.hidden_size * compute.BF16
        moments["backward of the output layer"] = held + held_by_all + head
    moment = max(moments, key=lambda name: moments[name].total())
    return Memory(dict(moments[moment]), moment)


def _layer_backward(args: Namespace, parts: Counter[Part], device: compute.Device) -> Counter[str]:
    """Return the bytes that backward needs beside what forward kept, in the largest part.

    Its first linear layer holds gradients of output, input and weight, and quantized operands; what
    the part kept behind that layer is free again.
    """
    tokens, tensor = args.micro_batch_size * args.seq_length, args.tensor_model_parallel_size
    most = 0.0
    for part in parts:
        rows = tokens * args.moe_router_topk if part.kind == "experts" else tokens
        needed = _linear_backward(args, part.first, rows, device)
        keeps = activation_bytes(args, part, tokens, device.scan)
        behind = keeps.get("activation", 0.0) + keeps.get("scan", 0.0)
        # In front of it, the activation's gradient and its input's are there at once.
        wide, inner = part.first.split(tensor)[1], part.second.split(tensor)[0]
        before = rows * (wide + inner) * compute.BF16
        most = max(most, needed - behind, before)
    stream = tokens * args.hidden_size * compute.BF16
    split = tensor if args.sequence_parallel else 1
    return Counter({"working memory": most + 2 * stream / split})


def _linear_backward(args: Namespace, linear: Linear, rows: int, device: compute.Device) -> float:
    inputs, outputs = linear.split(args.tensor_model_parallel_size)
    found = rows * (outputs + inputs) * compute.BF16
    weight = inputs * outputs
    quantized = linear.precision.quantized
    # Autograd gets an empty BF16 gradient in the place of one that is already added.
    found += weight * (compute.weight_gradient_bytes(args, linear, device) or compute.BF16)
    if quantized:
        for gemm, size in (("dgrad", rows * outputs), ("wgrad", rows * outputs), ("dgrad", weight)):
            name = device.gemm(linear.precision, gemm)
            found += size * (compute.BF16 if takes_values(name) else 1)
    return found
