"""Memory of one rank: weights and optimizer, tensors kept for backward, and the peak of a step.

Tensors kept for backward follow the table of arXiv 2205.05198 with other entries: attention keeps
no scores, RoPE nothing of a query, the activation only its input, a quantized linear layer the
codes and scales of its input. The tests count the tensors that autograd saves.
"""

from argparse import Namespace
from collections import Counter
from typing import NamedTuple

from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.plan import Saved, Source
from megatron_lowbit.planning.compute import (
    fuses_mlp,
    gradient_bytes,
    packed_bytes,
    weight_gradient_bytes,
)
from megatron_lowbit.planning.device import BF16, EXACT, FP32, Device, operand_bytes
from megatron_lowbit.planning.hardware import SCANS
from megatron_lowbit.planning.layouts import Layout
from megatron_lowbit.planning.model import (
    CONVOLUTION,
    CORE_ATTENTION,
    Amounts,
    Linear,
    Parameters,
    Part,
    is_gated,
    local_tokens,
    loss_fusion,
    mixer,
    query_groups,
    recomputed_modules,
    replicas,
    tokens_of,
)


class Memory(NamedTuple):
    """Bytes of one rank at its peak, by content, and the moment of the peak."""

    parts: dict[str, float]
    moment: str

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.parts.values())


def state(args: Namespace, count: Parameters) -> Amounts:
    """Return bytes of weights, gradients and optimizer: 18 per parameter, of which 12 are sharded.

    Each parameter is BF16 (megatron-core's Float16Module), with an FP32 main parameter and two
    moments. The precision-aware optimizer keeps moments in the given formats, and of an FP32 main
    parameter the 16 bits that the BF16 one lacks, unless codes take the BF16 one's place.
    """
    each = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    each += args.main_params_dtype.itemsize
    if args.use_precision_aware_optimizer and args.main_params_dtype.itemsize == FP32:
        each -= 0 if args.quantized_param_gather else BF16
    shards = replicas(args) if args.use_distributed_optimizer else 1
    shards_of_experts = max(1, shards // args.expert_model_parallel_size)
    held = (count.all - count.experts) / shards + count.experts / shards_of_experts
    weights, gradients = BF16 * count.all, gradient_bytes(args) * count.all
    return Amounts({"weights": weights, "main gradients": gradients, "optimizer": each * held})


def stores_codes(args: Namespace, linear: Linear) -> bool:
    """Return True if codes take the place of a layer's BF16 weight."""
    precision = linear.precision
    stored = precision.quantized and precision.storage_obstacle is None
    return bool(args.quantized_param_gather) and stored


def saved_parameter_bytes(args: Namespace, parts: Counter[Part]) -> float:
    """Return the bytes by which a rank's weights are smaller as codes, where they are sent so."""
    saved = 0.0
    for part, number in parts.items():
        for linear in part.linears:
            quantizer = linear.precision.fprop.rhs
            if quantizer and stores_codes(args, linear) and linear.precision.weight_in_one_set:
                each = BF16 - packed_bytes(quantizer)
                saved += number * part.experts * each * linear.weights
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
    head: Linear, device: Device,
) -> Memory:  # fmt: skip
    """Estimate the peak of a rank in one pipeline stage; ``head`` is the model's output layer."""
    held = state(args, count)
    if not device.accumulate:
        held = Amounts(weights=held["weights"])
    kept = Amounts()
    for part, number in parts.items():
        for linear in part.linears:
            times = number * part.experts
            stored = stores_codes(args, linear)
            is_exact = device.gemm(linear.precision, Gemm.FPROP) == EXACT
            step, microbatch = quantized_weight_bytes(linear, is_exact, stored)
            held["weights"] -= times * BF16 * linear.weights * stored
            held["quantized weights"] += times * step
            kept["quantized weights"] += times * microbatch
        kept.add(activation_bytes(args, part, device.scan), number)
    stream = local_tokens(args) * args.hidden_size * BF16
    recomputed = Amounts()
    if share := layout.recomputed_share(stage):
        # Groups of layers, by default of one, keep their input; one of them at a time all the rest.
        group = 1
        if args.recompute_method == "uniform":
            group = min(args.recompute_num_layers, max(layout.chunks[stage :: layout.pipeline]))
        recomputed = kept * (group / layout.layers(stage))
        kept *= 1 - share
        kept["recomputed layers' inputs"] = layout.recomputed_groups(stage, group) * stream
    held.add(kept, in_flight(layout, stage))
    is_last = stage == layout.pipeline - 1
    if is_last:  # which has the output layer
        is_exact = device.of_head.gemm(head.precision, Gemm.FPROP) == EXACT
        held["quantized weights"] += sum(quantized_weight_bytes(head, is_exact))
    moments = {"backward of a layer": held + recomputed + _backward_of_a_layer(args, parts, device)}
    if is_last:
        logits = tokens_of(args) * head.outputs
        # Cross-entropy copies BF16 logits to FP32, and back in the backward pass, unless it is
        # this project's, in place; with them are the final norm's input and output, then the
        # gradients of that norm's output and of the table, and quantized operands.
        size = BF16 if loss_fusion(args) == "lowbit" else BF16 + FP32
        loss = Amounts({"logits": logits * size, "working memory": 2 * stream})
        working = 3 * stream + BF16 * head.weights
        working += _quantized_operands(head, tokens_of(args), device.of_head)
        backward = Amounts({"logits": logits * BF16, "working memory": working})
        moments |= {"loss": held + loss, "backward of the output layer": held + backward}
    moment = max(moments, key=lambda name: moments[name].total())
    return Memory({name: size for name, size in moments[moment].items() if size > 0}, moment)


def _backward_of_a_layer(args: Namespace, parts: Counter[Part], device: Device) -> Amounts:
    """Return the bytes that backward needs in addition to what forward kept, in the largest part.

    Its first linear layer holds gradients of output, input and weight, and quantized operands; what
    the part kept behind that layer is free again.
    """
    largest = 0.0
    for part in parts:
        rows = tokens_of(args) * part.topk
        kept = activation_bytes(args, part, device.scan)
        free = kept["activation"] + kept["scan"]
        # In front of it, the activation's gradient and its input's are there at once.
        in_front = rows * part.second.inputs * BF16
        if not fuses_mlp(args, part, device):
            in_front += rows * part.first.outputs * BF16
        largest = max(largest, _linear_backward(args, part.first, rows, device) - free, in_front)
    stream = local_tokens(args) * args.hidden_size * BF16
    return Amounts({"working memory": largest + 2 * stream})


def _linear_backward(args: Namespace, linear: Linear, rows: int, device: Device) -> float:
    needed = rows * (linear.outputs + linear.inputs) * BF16
    # Autograd gets an empty BF16 gradient in the place of one that is already added.
    needed += linear.weights * (weight_gradient_bytes(args, linear, device) or BF16)
    return needed + _quantized_operands(linear, rows, device)


def _quantized_operands(linear: Linear, rows: int, device: Device) -> float:
    """Return the bytes of the gradient's and the weight's operands in a linear layer's backward."""
    precision, gradient = linear.precision, rows * linear.outputs
    if not precision.quantized:
        return 0.0
    dgrad, wgrad = (operand_bytes(device.gemm(precision, g)) for g in (Gemm.DGRAD, Gemm.WGRAD))
    return (gradient + linear.weights) * dgrad + gradient * wgrad


def quantized_weight_bytes(
    linear: Linear, is_exact: bool, stored: bool = False
) -> tuple[float, float]:
    """Return bytes of a layer's quantized weight that are kept for a step, and for each microbatch.

    A cached weight is quantized once, for fprop and dgrad. They share the codes where both take
    square blocks as ``is_exact`` BF16 numbers, or dgrad uses fprop's values, and where codes
    are ``stored`` in place of the weight; GEMMs of codes need them a second time, transposed.
    """
    plan = linear.precision.plan()
    weights = [plan[gemm, Role.WEIGHT] for gemm in (Gemm.FPROP, Gemm.DGRAD)]
    fprop, dgrad = (
        linear.weights * packed_bytes(weight.quantizer) if weight.quantizer else 0.0
        for weight in weights
    )
    source = weights[1].source
    if not linear.precision.caches_weight:
        return 0.0, dgrad if source is Source.TRANSPOSE else 0.0
    is_shared = source is Source.DEQUANTIZED or (
        source is Source.TRANSPOSE and (is_exact or stored)
    )
    return fprop if is_shared else fprop + dgrad, 0.0


def activation_bytes(args: Namespace, part: Part, scan: str = SCANS[0]) -> Amounts:
    """Return the bytes, by content, that one part keeps of a microbatch on one rank.

    ``scan`` is one of ``SCANS``.
    """
    tokens, local = tokens_of(args), local_tokens(args)
    rows = tokens * part.topk
    # A norm keeps its input, and one or two FP32 numbers per token.
    numbers = 2 if args.normalization == "LayerNorm" else 1
    kept = Amounts(norms=local * (args.hidden_size * BF16 + 4 * numbers))
    if part.name == "experts":
        # The router's input and, for each choice, index, weight and place of the token.
        kept["routing"] = local * args.hidden_size * BF16 + rows * 40
        if args.deterministic_mode and not args.moe_permute_fusion:
            # The experts' outputs: index_add keeps what it adds, scatter_add does not.
            kept["routing"] += rows * args.hidden_size * BF16
        kept["linear inputs"] = _saved_input(part.first, rows)
    else:
        kept["linear inputs"] = _saved_input(part.first, local, args.sequence_parallel)
    if part.name == "attention":
        kept["attention"] = _attention(args, tokens)
    elif part.name == "mamba":
        kept["scan"] = _scan(args, tokens, scan)
    else:
        kept["activation"] = _activation(args, part, rows)
    if not _reuses_input(args, part):
        kept["linear inputs"] += _saved_input(part.second, rows)
    if args.hidden_dropout > 0 and part.name != "mamba":
        kept["dropout masks"] = local * args.hidden_size
    return kept


def _saved_input(linear: Linear, tokens: int, split: bool = False) -> float:
    """Return the bytes of a linear layer's input; ``split``: over ranks, which may gather codes."""
    size = _bytes_of_codes(linear, tokens if split else 0)
    return tokens * linear.inputs * (BF16 if size is None else size)


def _bytes_of_codes(linear: Linear, split_tokens: int = 0) -> float | None:
    """Return the saved bytes per element of wgrad's input; None where the input itself is saved."""
    plan = linear.precision.plan(split_tokens=split_tokens)
    wgrad = plan[Gemm.WGRAD, Role.INPUT]
    saved = plan[Gemm.FPROP, Role.INPUT] if wgrad.saved is Saved.FPROP else wgrad
    if wgrad.saved is Saved.TENSOR or saved.quantizer is None:
        return None
    return packed_bytes(saved.quantizer)


def _reuses_input(args: Namespace, part: Part) -> bool:
    """Return True if the second layer keeps no input of its own: it is what attention keeps.

    A Transformer Engine layer quantizes it again for wgrad, unless attention is recomputed.
    """
    if part.name != "attention":
        return False
    recomputed = CORE_ATTENTION in recomputed_modules(args)
    again = args.transformer_impl == "transformer_engine" and not recomputed
    return again or _bytes_of_codes(part.second) is None


def _attention(args: Namespace, tokens: int) -> float:
    """Return the bytes that attention itself keeps.

    Flash and fused attention keep query, key, value and output, and each head's sum of
    exponentials. Local layers also keep the scores and their mask, and keys and values once for
    each query head.
    """
    tensor = args.tensor_model_parallel_size
    heads, groups = args.num_attention_heads // tensor, query_groups(args) // tensor
    if args.transformer_impl == "local":
        numbers = 4 * heads * args.kv_channels + heads * args.seq_length
        return float(tokens * numbers * BF16 + args.seq_length**2)
    return float(tokens * (2 * (heads + groups) * args.kv_channels * BF16 + 4 * heads))


def _activation(args: Namespace, part: Part, rows: int) -> float:
    """Return the bytes of the activation's input; squared ReLU, unfused, keeps its ReLU instead.

    Gated GELU is not fused: both factors are tensors of their own in addition.
    """
    size = 1 if args.activation_func_fp8_input_store else BF16
    outputs, inputs = part.first.outputs, part.second.inputs
    if part.name == "experts":
        # Fused, the token's weight goes with it; unfused it multiplies the activation.
        fused = args.swiglu and not args.add_bias_linear
        return rows * ((outputs if fused else outputs + inputs) * size + 4)
    if is_gated(args):
        return rows * (outputs if args.swiglu else outputs + 2 * inputs) * size
    return rows * inputs * size


def _scan(args: Namespace, tokens: int, scan: str) -> float:
    """Return the bytes that convolution, scan and gated norm keep, by which scan runs.

    mamba-ssm 2.2 fused with its convolution keeps the output of in_proj and the ungated output; its
    separate scan keeps copies of its inputs and the sums of log decays; torch's every FP32 tensor.
    """
    heads, inner, convolved = mixer(args)
    states, length = int(args.mamba_state_dim), int(args.seq_length)
    normed: float = inner * BF16 + 4 * args.mamba_num_groups / args.tensor_model_parallel_size
    if scan == "mamba-ssm":
        return tokens * ((2 * inner + convolved + heads) * BF16 + normed)
    padding = 1 + (CONVOLUTION - 1) / length
    convolution = convolved * (padding + 1) * BF16
    if scan == "mamba-ssm-scan":
        copies = (convolved + inner + heads) * BF16  # x, B, C; z; dt
        return tokens * (convolution + copies + inner * BF16 + 4 * heads + normed)
    chunk = min(128, length)  # megatron-core's default
    numbers: float = 9 * inner + 6 * heads * states + 3 * heads * chunk + 3 * heads
    numbers += 2 * inner * states / chunk  # the states of each chunk, in and out
    return tokens * (convolution + 4 * numbers)
