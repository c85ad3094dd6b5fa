"""Bytes that forward keeps for backward, part by part, on a GPU; the tests count what is saved.

It follows the table of arXiv 2205.05198 with other entries: attention keeps no scores, RoPE nothing
of a query, the activation only its input, a quantized linear layer codes and scales of its input.
"""

from argparse import Namespace
from collections import Counter

from megatron_lowbit.planning.hardware import SCANS
from megatron_lowbit.planning.model import (
    CONVOLUTION,
    Linear,
    Part,
    is_gated,
    mixer,
    query_groups,
)

Bytes = dict[str, float]
"""Bytes by what they are of."""
CHUNK = 128
"""Tokens that torch's scan takes together: megatron-core's default."""


def activation_bytes(
    args: Namespace, part: Part, tokens: int, scan: str = SCANS[0], element: int = 2
) -> Bytes:
    """Return the bytes that one part keeps of a microbatch of ``tokens`` on one rank.

    Tensor and sequence parallelism go by the arguments, ``scan`` is one of ``SCANS``. ``element``:
    bytes of a high-precision number.
    """
    tensor = args.tensor_model_parallel_size
    local = tokens // tensor if args.sequence_parallel else tokens
    found = Counter(norms=_norm(args, local, element))
    wide = part.first.split(tensor)[1]
    routed = tokens * args.moe_router_topk if part.kind == "experts" else 0
    if part.kind == "experts":
        # The router's input and, for each choice, index, weight and place of the token.
        found["routing"] = local * args.hidden_size * element + routed * 40
        found["linear inputs"] = _input(args, part.first, routed, element, gathered=True)
    else:
        found["linear inputs"] = _input(args, part.first, local, element)
    inner = part.second.split(tensor)[0]
    if part.kind == "attention":
        found["attention"] = _attention(args, tokens, element)
    elif part.kind == "mamba":
        found["scan"] = _scan(args, tokens, scan, element)
    else:
        found["activation"] = _activation(args, part.kind, routed or tokens, wide, inner, element)
    if not _reuses_input(args, part):
        found["linear inputs"] += _input(args, part.second, routed or tokens, element)
    if args.hidden_dropout > 0 and part.kind != "mamba":
        found["dropout masks"] = local * args.hidden_size
    return dict(found)


def quantized_weight_bytes(
    linear: Linear, tensor: int, as_values: bool, stored: bool = False
) -> tuple[float, float]:
    """Return bytes of a layer's quantized weight that are kept for a step, and for each microbatch.

    A cached weight is quantized once, for fprop and dgrad. They share the codes where both take
    square blocks ``as_values``, in BF16, where dgrad takes fprop's values, and where codes are
    ``stored`` in place of the weight; GEMMs of codes need them a second time, transposed.
    """
    precision = linear.precision
    sides = [precision.quantizer(gemm, "weight") for gemm in ("fprop", "dgrad")]
    elements = linear.inputs * linear.outputs // tensor
    sizes = [elements * q.format.bits_per_element / 8 if q is not None else 0.0 for q in sides]
    if not precision.quantized:
        return 0.0, 0.0
    if precision.caches_weight:
        of_fprop = precision.dgrad.rhs_of_fprop
        shared = as_values or stored if precision.weight_serves_dgrad else of_fprop
        return (sizes[0] if shared else sum(sizes)), 0.0
    return 0.0, sizes[1] if precision.weight_serves_dgrad else 0.0


def _norm(args: Namespace, tokens: int, element: int) -> float:
    """Return the bytes of a norm: its input, and one or two FP32 numbers a token."""
    numbers = 2 if args.normalization == "LayerNorm" else 1
    return tokens * (args.hidden_size * element + 4 * numbers)


def _bytes_of_input(linear: Linear) -> float | None:
    """Return the saved bytes an element of wgrad's input; None where the input itself is saved."""
    quantizer = linear.precision.quantizer("wgrad", "input")
    if quantizer is None or linear.precision.wgrad.fallback:
        return None
    return quantizer.format.bits_per_element / 8


def _input(
    args: Namespace, linear: Linear, tokens: int, element: int, gathered: bool = False
) -> float:
    size = _bytes_of_input(linear)
    inputs = linear.split(args.tensor_model_parallel_size)[0]
    split = args.sequence_parallel and linear.column and not gathered
    if size is None or (split and not linear.precision.gathers_codes("wgrad", tokens)):
        size = element
    return tokens * inputs * size


def _reuses_input(args: Namespace, part: Part) -> bool:
    """Return True if the second layer keeps no input of its own: it is what attention keeps.

    Transformer Engine's layer quantizes it again for wgrad, unless attention itself is recomputed.
    """
    if part.kind != "attention":
        return False
    # Megatron-LM recomputes attention where no module is named.
    modules = args.recompute_modules or ["core_attn"]
    recomputed = args.recompute_granularity == "selective" and "core_attn" in modules
    again = args.transformer_impl == "transformer_engine" and not recomputed
    return again or _bytes_of_input(part.second) is None


def _attention(args: Namespace, tokens: int, element: int) -> float:
    """Return the bytes that attention itself keeps.

    Flash and fused attention keep query, key, value and output, and each head's sum of
    exponentials. Local layers also keep the scores and their mask, and keys and values once for
    each query head.
    """
    tensor = args.tensor_model_parallel_size
    heads, groups = args.num_attention_heads // tensor, query_groups(args) // tensor
    if args.transformer_impl == "local":
        numbers = 4 * heads * args.kv_channels + heads * args.seq_length
        return tokens * numbers * element + args.seq_length**2
    return tokens * (2 * (heads + groups) * args.kv_channels * element + 4 * heads)


def _activation(
    args: Namespace, kind: str, tokens: int, wide: int, inner: int, element: int
) -> float:
    """Return the bytes of the activation's input; squared ReLU, unfused, keeps its ReLU instead.

    Gated GELU is not fused: both factors are tensors of their own beside it.
    """
    if args.activation_func_fp8_input_store:
        element = 1
    if kind == "experts":
        # Fused, the token's weight goes with it; unfused it multiplies the activation.
        fused = args.swiglu and not args.add_bias_linear
        return tokens * ((wide if fused else wide + inner) * element + 4)
    unfused = is_gated(args) and not args.swiglu
    return tokens * (wide + 2 * inner if unfused else wide if args.swiglu else inner) * element


def _scan(args: Namespace, tokens: int, scan: str, element: int) -> float:
    """Return the bytes that convolution, scan and gated norm keep, by which scan runs.

    mamba-ssm 2.2 fused with its convolution keeps the output of in_proj and the ungated output; its
    scan alone copies of its inputs and the sums of log decays; torch's every FP32 tensor.
    """
    sizes, tensor = mixer(args), args.tensor_model_parallel_size
    heads, inner = sizes.heads // tensor, sizes.inner // tensor
    convolved, state = sizes.convolved // tensor, args.mamba_state_dim
    normed = inner * element + 4 * args.mamba_num_groups / tensor
    if scan == "mamba-ssm":
        whole = inner + convolved + heads
        return tokens * ((whole + inner) * element + normed)
    padding = 1 + (CONVOLUTION - 1) / args.seq_length
    convolution = convolved * (padding + 1) * element
    if scan != "torch":
        copies = (convolved + inner + heads) * element  # x, B, C; z; dt
        return tokens * (convolution + copies + inner * element + 4 * heads + normed)
    chunk = min(CHUNK, args.seq_length)
    numbers = 9 * inner + 6 * heads * state + 3 * heads * chunk + 3 * heads
    numbers += 2 * inner * state / chunk  # the states of each chunk, in and out
    return tokens * (convolution + 4 * numbers)
