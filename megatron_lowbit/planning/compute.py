"""Time of one part's forward and backward pass on one GPU: GEMMs, quantization and the rest.

A GEMM takes its FLOPs at the rate of the tensor cores that multiply its formats, or its bytes at
the copy's bandwidth, whichever is longer. Other kernels take the bytes that they read and write,
each counted once; quantization adds the time of transforms and random numbers. All times are in
seconds per microbatch.
"""

from argparse import Namespace
from math import log2
from typing import NamedTuple

from megatron_lowbit.kernels.support import kernel_of
from megatron_lowbit.numerics import Quantizer, Request, Rounding
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm, Role
from megatron_lowbit.numerics.plan import Source
from megatron_lowbit.planning.device import ADDS_PRODUCTS, BF16, FOLDED, FP32, Device, operand_bytes
from megatron_lowbit.planning.hardware import GPU
from megatron_lowbit.planning.model import (
    Amounts,
    Linear,
    Part,
    is_gated,
    local_tokens,
    loss_fusion,
    mixer,
    query_groups,
    tokens_of,
)
from megatron_lowbit.recipes import LinearPrecision

_SCAN_FORWARD = 0.37
"""Forward share of the scan's time, mamba-ssm's and torch's in scan-h200.json."""


class Passes(NamedTuple):
    """Times of a forward and a backward pass of a microbatch, and of the work done once per step.

    ``step`` is negative where a step's first microbatch takes less than the others.
    """

    forward: Amounts
    backward: Amounts
    step: Amounts

    @classmethod
    def none(cls) -> "Passes":
        """Return passes that take no time."""
        return cls(Amounts(), Amounts(), Amounts())

    def add(self, other: "Passes", times: int = 1) -> None:
        """Add other passes, in place."""
        for seconds, more in zip(self, other, strict=True):
            seconds.add(more, times)


def part_times(args: Namespace, part: Part, device: Device) -> Passes:
    """Time one part of a microbatch on one rank, with its tensor- and expert-parallel transfers."""
    passes = Passes.none()
    rows = tokens_of(args) * part.topk
    known = (Role.GRAD, Role.INPUT) if fuses_mlp(args, part, device) else (None, None)
    gemms = [
        _linear(args, linear, rows, device, passes, part.experts, role)
        for linear, role in zip(part.linears, known, strict=True)
    ]
    there, back = _elementwise(args, part)
    passes.forward["elementwise"] += device.moved(there)
    passes.backward["elementwise"] += device.moved(back)
    if part.name == "attention":
        passes.forward["attention"], passes.backward["attention"] = _attention(args, device)
    if part.name == "mamba":
        channels = mixer(args).inner * args.mamba_state_dim / 128
        scan = tokens_of(args) * channels * device.gpu[f"scan_ps.{device.scan}"] * 1e-12
        passes.forward["scan"] = _SCAN_FORWARD * scan
        passes.backward["scan"] = (1 - _SCAN_FORWARD) * scan
    _add_communication(args, part, device, gemms[0], passes)
    return passes


def fuses_mlp(args: Namespace, part: Part, device: Device) -> bool:
    """Return True if one function computes an MLP: SwiGLU and its gradient then give amaxes.

    Their kernels take as long as Megatron-LM's. The gradient takes the memory of SwiGLU's input.
    """
    is_changed = args.activation_func_clamp_value is not None or args.glu_linear_offset
    other = is_changed or args.activation_func_fp8_input_store or args.add_bias_linear
    if other or part.name != "mlp" or not (args.swiglu and args.bias_swiglu_fusion):
        return False
    return all(device.is_lowbit(linear.precision) for linear in part.linears)


def _add_communication(
    args: Namespace, part: Part, device: Device, hiding: dict[Gemm, float], passes: Passes
) -> None:
    """Add the time of tensor-, context- and expert-parallel communication of one part.

    With sequence parallelism the first layer gathers its input, as codes where it quantizes them,
    in forward and for wgrad, and the second scatters sums; without, it reduces them. The sums of a
    first layer's dgrad overlap wgrad. ``hiding``: seconds of the first layer's GEMMs.
    """
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    tokens, first = tokens_of(args), part.first.precision
    if tensor > 1:
        link, plan = device.link(tensor), first.plan(split_tokens=local_tokens(args))

        def gathered(gemm: Gemm | None = None) -> float:
            sent = plan[gemm, Role.INPUT] if gemm else None
            codes = sent.quantizer if sent and sent.gathers_codes else None
            size = BF16 if codes is None else packed_bytes(codes)
            return link.gather(tokens * args.hidden_size * size, tensor)

        stream = gathered()
        if args.sequence_parallel:
            again = gathered(Gemm.WGRAD)
            if not first.quantized:
                again = max(0.0, again - hiding[Gemm.DGRAD])
            passes.forward["tensor parallel"] = gathered(Gemm.FPROP) + stream
            passes.backward["tensor parallel"] = (
                stream + again + max(0.0, stream - hiding[Gemm.WGRAD])
            )
        else:
            passes.forward["tensor parallel"] = 2 * stream
            passes.backward["tensor parallel"] = max(0.0, 2 * stream - hiding[Gemm.WGRAD])
    context = args.context_parallel_size
    if part.name == "attention" and context > 1:
        # Keys and values go around the ranks while others are multiplied, backward with gradients.
        heads = 2 * query_groups(args) // tensor
        sent = (context - 1) * tokens * heads * args.kv_channels * BF16
        there = device.link(context, tensor).send(sent)
        forward, backward = _attention(args, device)
        passes.forward["context parallel"] = max(0.0, there - forward)
        passes.backward["context parallel"] = max(0.0, 2 * there - backward)
    if part.name == "experts" and expert > 1:
        # There and back; each rank sends and receives its own tokens' choices.
        sent = tokens // tensor * args.moe_router_topk * args.hidden_size * (expert - 1) / expert
        link = device.link(expert, tensor, ring=False)
        codes = first.fprop.lhs if args.quantized_expert_dispatch else None
        there = link.send(sent * (BF16 if codes is None else packed_bytes(codes)))
        back = link.send(sent * BF16)
        passes.forward["expert parallel"] = there + back
        passes.backward["expert parallel"] = 2 * back


LOSS_BYTES = {None: (38, 14), "native": (22, 6), "liger": (8, 14), "lowbit": (2, 4)}
"""Bytes per BF16 logit that the loss moves, forward and backward, by what fuses it.

Cross-entropy copies logits to FP32, finds the maximum, subtracts it, exponentiates, sums and
divides; backward multiplies and casts. Fused, these are three kernels and one. liger-kernel reads
logits twice, for the maximum and to write exponentials in FP32; backward writes gradients in place
of these and casts them. This project's kernels read logits, and read them again to write gradients.
"""


def head_times(args: Namespace, head: Linear, device: Device) -> Passes:
    """Time the final norm, the output layer ``head`` and the loss."""
    tokens, passes = tokens_of(args), Passes.none()
    _linear(args, head, tokens, device.of_head, passes)
    logits, norm = tokens * head.outputs, tokens * args.hidden_size * BF16
    there, back = LOSS_BYTES[loss_fusion(args)]
    passes.forward["elementwise"] += device.moved(there * logits + 2 * norm)
    passes.backward["elementwise"] += device.moved(back * logits + 3 * norm)
    return passes


def gradient_bytes(args: Namespace) -> int:
    """Return the bytes of an element of a main gradient."""
    return BF16 if args.grad_reduce_in_bf16 else FP32


def weight_gradient_bytes(args: Namespace, linear: Linear, device: Device) -> int:
    """Return the bytes of an element of dW before it is added to the main gradient.

    0 where the GEMM adds it: Megatron-LM's fused accumulation of gradients, unless the engine's
    GEMM can only return a product, in FP32.
    """
    if not (device.accumulate and args.gradient_accumulation_fusion):
        return BF16
    wgrad = linear.precision.wgrad
    is_plain = wgrad.accumulation is None and not wgrad.keeps_sources
    return 0 if is_plain and device.gemm(linear.precision, Gemm.WGRAD) in ADDS_PRODUCTS else FP32


def packed_bytes(quantizer: Quantizer) -> float:
    """Return the bytes per element of codes and scales."""
    return quantizer.format.bits_per_element / 8


def _linear(
    args: Namespace, linear: Linear, rows: int, device: Device, passes: Passes, experts: int = 1,
    known: Role | None = None,
) -> dict[Gemm, float]:  # fmt: skip
    """Add the time of a linear layer, and return the seconds of its GEMMs.

    ``experts`` on the rank share the rows. ``known``: the source whose amax comes with it.
    """
    inputs, outputs = linear.inputs, linear.outputs
    names = {gemm: device.gemm(linear.precision, gemm) for gemm in GEMM_ROLES}
    size = weight_gradient_bytes(args, linear, device)
    main = 2 * gradient_bytes(args)  # read and written
    # main_grad-h100.json: GEMMs overlap nearly all of the sum that they add to.
    accumulates = device.accumulate and size == 0
    added = {Gemm.WGRAD: main * linear.weights} if accumulates else {}
    seconds = {
        gemm: experts
        * device.multiplied(rows / experts, inputs, outputs, name, added.get(gemm, 0.0))
        for gemm, name in names.items()
    }
    passes.forward["GEMM"] += seconds[Gemm.FPROP]
    passes.backward["GEMM"] += seconds[Gemm.DGRAD] + seconds[Gemm.WGRAD]
    weights = linear.weights * experts
    if device.accumulate and size > 0:
        # dW is written, read again and added.
        passes.backward["elementwise"] += device.moved(weights * (2 * size + main))
    if linear.precision.quantized:
        sizes = {Role.INPUT: rows * inputs, Role.GRAD: rows * outputs, Role.WEIGHT: weights}
        quantization = _quantization(linear.precision, sizes, names, device, known)
        for total, more in zip(passes, quantization, strict=True):
            total["quantization"] += more
    return seconds


def _quantization(
    precision: LinearPrecision, sizes: dict[Role, int], names: dict[Gemm, str], device: Device,
    known: Role | None,
) -> tuple[float, float, float]:  # fmt: skip
    """Return the seconds of quantizing in forward, in backward, and of a cached weight per step.

    A source is quantized for both its GEMMs at once. Backward converts the saved codes of the input
    into wgrad's operand; each pass converts the codes of a cached weight. ``sizes``: elements of
    each source. ``known``: the source whose amax comes with it.
    """
    delayed = precision.history_length > 0

    def quantized(role: Role, *gemms: Gemm, saved: tuple[Gemm, ...] = ()) -> float:
        sides = [(gemm, q) for gemm in gemms if (q := precision.quantizer(gemm, role)) is not None]
        if not sides:
            return 0.0
        amaxes = any(
            (
                q.format.row_scaled
                or (q.format.tensor_scaled and not delayed)
                or (q.format.folds and names[gemm] == FOLDED)
            )
            and not (role is known and Request(q, precision.gemms[gemm].hadamard).takes_tensor_amax)
            for gemm, q in sides
        )
        # Read, once more for amaxes, and written.
        count = BF16 * (1 + amaxes) + sum(
            BF16 if operand_bytes(names[gemm]) == BF16 and gemm not in saved else packed_bytes(q)
            for gemm, q in sides
        )
        extra = sum(_extra_ps(gemm, q, precision, device.gpu) for gemm, q in sides)
        return device.moved(sizes[role] * count) + sizes[role] * extra * 1e-12

    def unpacked(role: Role, gemm: Gemm) -> float:
        """Return the seconds of converting saved codes into the GEMM's operand."""
        quantizer, taken = precision.quantizer(gemm, role), operand_bytes(names[gemm])
        if quantizer is None or quantizer.format.element.bits == 8 * taken:
            return 0.0
        return device.moved(sizes[role] * (packed_bytes(quantizer) + taken))

    fprop, dgrad, wgrad = Gemm
    forward = quantized(Role.INPUT, fprop, wgrad, saved=(wgrad,))
    backward = quantized(Role.GRAD, dgrad, wgrad) + unpacked(Role.INPUT, wgrad)
    weight = Role.WEIGHT
    if precision.caches_weight:
        forward += unpacked(weight, fprop)
        backward += unpacked(weight, dgrad)
        return forward, backward, quantized(weight, fprop, dgrad, saved=(fprop, dgrad))
    if precision.plan()[dgrad, weight].source is Source.TRANSPOSE:
        return forward + quantized(weight, fprop, dgrad), backward, 0.0
    return forward + quantized(weight, fprop), backward + quantized(weight, dgrad), 0.0


def _extra_ps(gemm: Gemm, quantizer: Quantizer, precision: LinearPrecision, gpu: GPU) -> float:
    """Return the ps per element that quantizing an operand takes beyond moving it."""
    transform = precision.gemms[gemm].hadamard
    extra = gpu["hadamard_ps"] * log2(transform.size) if transform is not None else 0.0
    extra += gpu["stochastic_ps"] * (quantizer.rounding is Rounding.STOCHASTIC)
    kernel = kernel_of(quantizer.format)
    extra += gpu["chosen_scale_ps"] * (kernel is not None and kernel.from_numbers)
    return extra + gpu["mean_ps"] * quantizer.splits_mean


def _attention(args: Namespace, device: Device) -> tuple[float, float]:
    """Return the seconds of attention itself, forward and backward.

    Transformer Engine computes half of the scores: two GEMMs forward, five backward with the
    scores again. Local layers compute all scores, in two and four GEMMs, and move them.
    """
    heads = args.num_attention_heads // args.tensor_model_parallel_size
    scores = tokens_of(args) * args.seq_length * heads
    flops = scores * args.kv_channels  # of half of the scores
    if args.transformer_impl == "local":
        rate = device.flops("bf16")
        there, back = device.moved(6 * BF16 * scores), device.moved(10 * BF16 * scores)
        return 4 * flops / rate + there, 8 * flops / rate + back
    share = 1.0 if args.kv_channels >= 128 else 0.67  # as published of cuDNN
    rate = share * 1e12
    there, back = device.gpu["attention_forward"], device.gpu["attention_backward"]
    return 2 * flops / (there * rate), 5 * flops / (back * rate)


def _elementwise(args: Namespace, part: Part) -> tuple[float, float]:
    """Return the bytes that norms, residuals and activations move, forward and backward."""
    tokens, stream = tokens_of(args), local_tokens(args) * args.hidden_size
    rows = tokens * part.topk
    outputs, inputs = part.first.outputs, part.second.inputs
    forward, backward = 5.0 * stream, 6.0 * stream
    if part.name == "attention":
        values = query_groups(args) // args.tensor_model_parallel_size * args.kv_channels
        turned = 2 * (outputs - values) if args.position_embedding_type == "rope" else 0
        forward += tokens * (turned + 2 * values)
        # The gradients of query, key and value are put together.
        backward += tokens * (turned + 2 * outputs)
    elif part.name == "mamba":
        # To and from batch-first, and the gated norm.
        forward += tokens * (2 * outputs + 4 * inputs)
        backward += tokens * (2 * outputs + 5 * inputs)
    else:
        # Squared ReLU is ReLU and a power, a kernel for every operation.
        there, back = (3, 5) if is_gated(args) else (4, 10) if args.squared_relu else (2, 3)
        forward += rows * inputs * there
        backward += rows * inputs * back
    if part.name == "experts":
        # Tokens are gathered by expert and put back, each way.
        forward += 4.0 * rows * args.hidden_size
        backward += 4.0 * rows * args.hidden_size
    return BF16 * forward, BF16 * backward
