"""Time of one part's forward and backward pass on one GPU: GEMMs, quantization and the rest.

A GEMM takes its FLOPs at the rate of the tensor cores that multiply its formats, or its bytes at
the copy's bandwidth, whichever is longer. Other kernels take the bytes that they read and write,
each counted once, and quantization what transforms and random numbers take on top. All in seconds,
for a microbatch.
"""

from argparse import Namespace
from collections import Counter
from math import log2
from typing import NamedTuple

from megatron_lowbit.numerics import Quantizer, Rounding
from megatron_lowbit.planning.hardware import GPU
from megatron_lowbit.planning.model import Linear, Part, is_gated, mixer, query_groups
from megatron_lowbit.planning.routing import adds_products, gemm_name, takes_folded, takes_values
from megatron_lowbit.recipes import LinearPrecision

BF16, FP32 = 2, 4
Seconds = Counter[str]
"""Seconds by what takes them."""
_SCAN_FORWARD = 0.37
"""Forward share of the scan's time, mamba-ssm's and torch's in scan-h200.json."""
_SMALL_HEADS = 0.67
"""Rate of attention with heads below 128 channels, relative to 128; cuDNN's, published."""


class Passes(NamedTuple):
    """A part's times: forward and backward pass of a microbatch, and once a step.

    ``step`` is negative where a step's first microbatch takes less than the others.
    ``dgrad`` and ``wgrad`` are the first linear layer's GEMMs, which communication hides behind.
    """

    forward: Seconds
    backward: Seconds
    step: Seconds
    dgrad: float = 0.0
    wgrad: float = 0.0


class Device(NamedTuple):
    """The GPU, and what runs on it."""

    gpu: GPU
    transformer_engine: bool
    scan: str
    accumulate: bool = True
    """True if weight gradients are added to FP32 main gradients."""

    def moved(self, count: float) -> float:
        """Return seconds that a kernel takes which reads and writes so many bytes."""
        return count / (self.gpu["copy_tb_per_s"] * self.gpu["kernel_share"] * 1e12)

    def gemm(self, precision: LinearPrecision, name: str) -> str:
        """Return the name of what multiplies one of a linear layer's GEMMs."""
        return gemm_name(precision, name, self.gpu.capability, self.transformer_engine)


def part_times(args: Namespace, part: Part, tokens: int, device: Device) -> Passes:
    """Time one part of ``tokens`` tokens of a microbatch, on one tensor-parallel rank."""
    tensor = args.tensor_model_parallel_size
    local = tokens // tensor if args.sequence_parallel else tokens
    routed = tokens * args.moe_router_topk if part.kind == "experts" else tokens
    experts = experts_of(args, part)
    times = [_linear(args, linear, routed, device, experts) for linear in part[1:]]
    forward, backward, step = Counter(), Counter(), Counter()
    for found in times:
        for sums, more in zip((forward, backward, step), found, strict=False):
            sums.update(more)  # keeps what is negative, which + does not
    one_way, back = _around(args, part, tokens, local, routed)
    forward["elementwise"] += device.moved(one_way)
    backward["elementwise"] += device.moved(back)
    if part.kind == "attention":
        times_of = _attention(args, tokens, device)
        forward["attention"], backward["attention"] = times_of
    if part.kind == "mamba":
        channels = mixer(args).inner / tensor * args.mamba_state_dim / 128
        scan = tokens * channels * device.gpu[f"scan_ps.{device.scan}"] * 1e-12
        forward["scan"], backward["scan"] = _SCAN_FORWARD * scan, (1 - _SCAN_FORWARD) * scan
    return Passes(forward, backward, step, times[0].dgrad, times[0].wgrad)


def experts_of(args: Namespace, part: Part) -> int:
    """Return the experts of a part on a rank, which run one after another; 1 for other parts."""
    return args.num_experts // args.expert_model_parallel_size if part.kind == "experts" else 1


def head_times(args: Namespace, vocabulary: int, tokens: int, device: Device) -> Passes:
    """Time the final norm, the output layer and the loss."""
    linear, tensor = Linear(args.hidden_size, vocabulary, True), args.tensor_model_parallel_size
    times = _linear(args, linear, tokens, device)
    logits, norm = tokens * vocabulary // tensor, tokens * args.hidden_size * BF16
    forward, backward = _loss_moves(args)
    times.forward["elementwise"] += device.moved(forward * logits + 2 * norm)
    times.backward["elementwise"] += device.moved(backward * logits + 3 * norm)
    return times


def _loss_moves(args: Namespace) -> tuple[int, int]:
    """Return the bytes per logit that cross-entropy reads and writes, forward and backward.

    It copies logits to FP32, finds the maximum, subtracts it, exponentiates, sums and divides;
    backward multiplies and casts. Fused, these are three kernels and one.
    """
    if args.cross_entropy_loss_fusion:
        return BF16 + 5 * FP32, BF16 + FP32
    return BF16 + 9 * FP32, BF16 + 3 * FP32


def embedding_times(args: Namespace, vocabulary: int, device: Device) -> Passes:
    """Time the table's dense gradient: set to zero, written, added to the main gradient."""
    table = vocabulary // args.tensor_model_parallel_size * args.hidden_size
    return Passes(Counter(), Counter(elementwise=device.moved(14 * table)), Counter())


def gemm_seconds(
    rows: float, inputs: int, outputs: int, name: str, gpu: GPU, added: float = 0.0
) -> float:
    """Time one GEMM of (rows, inputs) by (inputs, outputs), forward or backward.

    ``added``: bytes of the main gradient that it reads and writes to add its product.
    """
    flops = 2.0 * rows * inputs * outputs
    code = BF16 if name == "bf16" else 1
    touched = code * (rows * inputs + inputs * outputs) + BF16 * rows * outputs + added
    rate = gpu[f"gemm.{name}"] * gpu["gemm_sustained"] * 1e12
    return max(flops / rate, touched / (gpu["copy_tb_per_s"] * 1e12))


def _linear(
    args: Namespace, linear: Linear, tokens: int, device: Device, experts: int = 1
) -> Passes:
    """Time a linear layer; ``experts`` on the rank share the tokens."""
    inputs, outputs = linear.split(args.tensor_model_parallel_size)
    names = {gemm: device.gemm(linear.precision, gemm) for gemm in ("fprop", "dgrad", "wgrad")}
    size = weight_gradient_bytes(args, linear, device)
    main = 2 * gradient_bytes(args)  # read and written
    accumulates = device.accumulate and size == 0
    # main_grad-h200.json: an FP8 GEMM overlaps nothing of an FP32 sum, a BF16 GEMM nearly all.
    exposed = accumulates and takes_folded(names["wgrad"]) and gradient_bytes(args) == FP32
    added = {"wgrad": float(main * inputs * outputs)} if accumulates and not exposed else {}
    seconds = {
        gemm: experts
        * gemm_seconds(tokens / experts, inputs, outputs, name, device.gpu, added.get(gemm, 0.0))
        for gemm, name in names.items()
    }
    forward = Counter({"GEMM": seconds["fprop"]})
    backward = Counter({"GEMM": seconds["dgrad"] + seconds["wgrad"]})
    step: Seconds = Counter()
    weights = inputs * outputs * experts
    if device.accumulate and size > 0:
        # dW is written, read again and added.
        backward["elementwise"] += device.moved(weights * (2 * size + main))
    if exposed:
        # A step's first microbatch only writes, which the GEMM overlaps.
        adding = device.moved(weights * main)
        backward["GEMM"] += adding
        step["GEMM"] -= adding
    if linear.precision.quantized:
        quantized = _quantization(linear, tokens, weights, inputs, outputs, names, device)
        for times, seconds_of in zip((forward, backward, step), quantized, strict=True):
            times["quantization"] += seconds_of
    return Passes(forward, backward, step, seconds["dgrad"], seconds["wgrad"])


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
    precision = linear.precision.wgrad
    plain = precision.accumulation is None and precision.fallback is None
    adds = plain and adds_products(device.gemm(linear.precision, "wgrad"))
    return 0 if adds else FP32


def _quantization(
    linear: Linear, tokens: int, weights: int, inputs: int, outputs: int,
    names: dict[str, str], device: Device,
) -> tuple[float, float, float]:  # fmt: skip
    """Return the seconds of quantizing in forward, in backward, and of a cached weight per step.

    A source is quantized for both its GEMMs at once. Backward turns the codes that forward kept of
    the input into what wgrad takes; each pass does so with those of a cached weight.
    """
    precision = linear.precision
    delayed = precision.history_length > 0
    sizes = {"input": tokens * inputs, "grad": tokens * outputs, "weight": weights}

    def made(role: str, *gemms: str, saved: tuple[str, ...] = ()) -> float:
        sides = [(gemm, q) for gemm in gemms if (q := precision.quantizer(gemm, role)) is not None]
        if not sides:
            return 0.0
        amaxes = (
            q.format.row_scaled
            or (q.format.tensor_scaled and not delayed)
            or (q.format.folds and takes_folded(names[gemm]))
            for gemm, q in sides
        )
        passes = 1 + any(amaxes)
        written = sum(
            BF16 if takes_values(names[gemm]) and gemm not in saved else _packed(q)
            for gemm, q in sides
        )
        extra = sum(_extra_ps(gemm, q, precision, device.gpu) for gemm, q in sides)
        return device.moved(sizes[role] * (BF16 * passes + written)) + sizes[role] * extra * 1e-12

    def unpacked(role: str, gemm: str) -> float:
        """Return the seconds of turning saved codes into what the GEMM takes."""
        quantizer = precision.quantizer(gemm, role)
        bits = 8 * BF16 if takes_values(names[gemm]) else 8
        if quantizer is None or quantizer.format.element.bits == bits:
            return 0.0
        return device.moved(sizes[role] * (_packed(quantizer) + bits / 8))

    forward = made("input", "fprop", "wgrad", saved=("wgrad",))
    backward = made("grad", "dgrad", "wgrad") + unpacked("input", "wgrad")
    if precision.caches_weight:
        forward += unpacked("weight", "fprop")
        backward += unpacked("weight", "dgrad")
        return forward, backward, made("weight", "fprop", "dgrad", saved=("fprop", "dgrad"))
    if precision.weight_serves_dgrad:
        return forward + made("weight", "fprop", "dgrad"), backward, 0.0
    return forward + made("weight", "fprop"), backward + made("weight", "dgrad"), 0.0


def _packed(quantizer: Quantizer) -> float:
    return quantizer.format.bits_per_element / 8


def _extra_ps(gemm: str, quantizer: Quantizer, precision: LinearPrecision, gpu: GPU) -> float:
    """Return the ps an element that one side takes beyond what it moves."""
    transform = precision.gemms[gemm].hadamard
    found = gpu["hadamard_ps"] * log2(transform.size) if transform is not None else 0.0
    found += gpu["stochastic_ps"] * (quantizer.rounding is Rounding.STOCHASTIC)
    found += gpu["chosen_scale_ps"] * quantizer.format.scales_from_numbers
    return found + gpu["mean_ps"] * quantizer.splits_mean


def _attention(args: Namespace, tokens: int, device: Device) -> tuple[float, float]:
    """Return the seconds of attention itself, forward and backward.

    Transformer Engine computes half of the scores: two GEMMs forward, five backward with the
    scores again. Local layers compute all scores, in two and four GEMMs, and move them.
    """
    heads, gpu = args.num_attention_heads // args.tensor_model_parallel_size, device.gpu
    one = tokens * args.seq_length * heads * args.kv_channels  # 2 FLOPs, half of the scores
    if args.transformer_impl == "local":
        rate = gpu["gemm.bf16"] * gpu["gemm_sustained"] * 1e12
        scores = BF16 * tokens * args.seq_length * heads
        moved = device.moved(6 * scores), device.moved(10 * scores)
        return 4 * one / rate + moved[0], 8 * one / rate + moved[1]
    share = 1.0 if args.kv_channels >= 128 else _SMALL_HEADS
    rates = [gpu[f"attention_{name}"] * share * 1e12 for name in ("forward", "backward")]
    return 2 * one / rates[0], 5 * one / rates[1]


def _around(
    args: Namespace, part: Part, tokens: int, local: int, routed: int
) -> tuple[float, float]:
    """Return the bytes that norms, residuals and activations move, forward and backward."""
    forward, backward = 5.0 * local * args.hidden_size, 6.0 * local * args.hidden_size
    tensor = args.tensor_model_parallel_size
    wide, inner = part.first.split(tensor)[1], part.second.split(tensor)[0]
    if part.kind == "attention":
        values = query_groups(args) // tensor * args.kv_channels
        turned = 2 * (wide - values) if args.position_embedding_type == "rope" else 0
        forward += tokens * (turned + 2 * values)
        # The gradients of query, key and value are put together.
        backward += tokens * (turned + 2 * wide)
    elif part.kind == "mamba":
        # To and from batch-first, and the gated norm.
        forward += tokens * (2 * wide + 4 * inner)
        backward += tokens * (2 * wide + 5 * inner)
    else:
        more = _activation_moves(args)
        forward += routed * inner * more[0]
        backward += routed * inner * more[1]
    if part.kind == "experts":
        # Tokens are gathered by expert and put back, each way.
        forward += 4.0 * routed * args.hidden_size
        backward += 4.0 * routed * args.hidden_size
    return BF16 * forward, BF16 * backward


def _activation_moves(args: Namespace) -> tuple[int, int]:
    """Return reads and writes an output element of the activation, forward and backward."""
    if is_gated(args):
        return 3, 5
    if args.squared_relu:
        return 4, 10  # ReLU and a power, a kernel for every operation
    return 2, 3
