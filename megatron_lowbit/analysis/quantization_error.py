"""Quantization error of the operands and the outputs of a layer's GEMMs.

Measured as sums, which add up over calls and ranks, and then as figures:

    sqnr_db       signal over noise of an operand, dB; after its transform, if it has one
    flushed       share of its values other than zero that became zero
    saturated     share of its values beyond the largest number of their block
    amax          its largest magnitude
    nonfinite     how many of its values are infinite or NaN, before the transform
    block_spread  standard deviation of the log2 of its blocks' largest magnitudes
    folded        share of both operands' values that were rounded again when folded (MXFP4 on FP8)
    error         of a GEMM's output: norm of what differs from operands in high precision, over
                  that output's norm
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.layers import LinearContext
from megatron_lowbit.layers.operands import requantized
from megatron_lowbit.numerics import QuantizedTensor, Request, hadamard_transform
from megatron_lowbit.numerics.formats import decode, unpack_nibbles
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm, Role

Sums = dict[str, Tensor]
"""Scalars of FP64 on the device, by name; ``*/amax`` are maxima, all others sums."""
_LARGEST = "amax"
NONFINITE = "nonfinite"
"""Name, after the operand's, of the number of values that are infinite or NaN."""


def gemm_sums(context: LinearContext, gemm: Gemm, lhs: Tensor, rhs: Tensor) -> Sums:
    """Measure one GEMM lhs (A, L) . rhs (B, L)^T: its operands and its output.

    ``lhs`` and ``rhs`` are in high precision, transposed as the GEMM contracts them. The result is
    empty where the recipe quantizes neither.
    """
    sums: Sums = {}
    operands: list = []
    for role, x in zip(GEMM_ROLES[gemm], (lhs, rhs), strict=True):
        operand, of_operand = _measured(context, gemm, role, x)
        operands.append(operand)
        sums |= {f"{role}/{k}": v for k, v in of_operand.items()}
    if not sums:
        return {}
    wanted = lhs.float() @ rhs.float().t()
    wrong = context.gemm(gemm, *operands, torch.float32) - wanted
    inexact, values = context.engine.fold_losses(*operands)
    sums |= {"signal": _energy(wanted), "noise": _energy(wrong)}
    if values:
        sums |= {"folded": _number(inexact, lhs), "foldable": _number(values, lhs)}
    return {f"{gemm}/{name}": value for name, value in sums.items()}


def _measured(context: LinearContext, gemm: Gemm, role: Role, x: Tensor) -> tuple[Any, Sums]:
    """Return an operand as the GEMM takes it, and its sums; none where it is not quantized.

    Values of another GEMM's operand are measured along that one's axis.
    """
    origin = context.precision.origin(gemm, role)
    if origin != gemm:
        made, _ = context.quantize(x.t(), role, origin, None, needs_codes={origin})
        request = context.request(origin, role, x.shape[1])
        serves_both = gemm == Gemm.DGRAD and context.precision.weight_serves_dgrad
        # The context transposes fprop's operands itself.
        transposes = origin == Gemm.FPROP and not serves_both
        operand = made if transposes else made.dequantize().t()
        return operand, operand_sums(x.t(), made, request)
    if context.precision.requantizes(gemm, role):
        forward, _ = context.quantize(x.t(), role, Gemm.FPROP, None, needs_codes={Gemm.FPROP})
        made = requantized(context, role, forward)
    else:
        made, _ = context.quantize(x, role, gemm, None, needs_codes={gemm})
    request = context.request(gemm, role, len(x))
    return made, {} if request is None else operand_sums(x, made, request)


def operand_sums(x: Tensor, made: QuantizedTensor, request: Request) -> Sums:
    """Measure the quantization of x (R, L) along its last axis."""
    wanted = x.float()
    if request.hadamard is not None:
        wanted = hadamard_transform(x, request.hadamard, request.sign_key)
    got = made.dequantize()
    element = made.format.element
    codes = unpack_nibbles(made.codes) if element.bits == 4 else made.codes
    at_end = decode(codes.flatten(1), element).abs()[:, : got.shape[1]] == element.max
    mean = 0.0 if made.mean is None else made.mean
    beyond = (wanted - mean).abs() > (got - mean).abs()
    found = {
        "signal": _energy(wanted),
        "noise": _energy(got - wanted),
        "values": _number(wanted.numel(), x),
        "nonzero": (wanted != 0).sum().double(),
        "flushed": ((wanted != 0) & (got == 0)).sum().double(),
        "saturated": (at_end & beyond).sum().double(),
        _LARGEST: x.abs().amax().double(),
        NONFINITE: (~x.isfinite()).sum().double(),
    }
    return found | _block_sums(wanted, made.format.block)


def _block_sums(x: Tensor, block: int) -> Sums:
    """Return sums for the spread of blocks' amaxes; none for one block a row."""
    if not 1 < block < x.shape[1]:
        return {}
    padded = F.pad(x, (0, -x.shape[1] % block))
    largest = padded.unflatten(1, (-1, block)).abs().amax(-1)
    logs = largest[largest > 0].double().log2()
    return {
        "blocks": _number(logs.numel(), x),
        "block_logs": logs.sum(),
        "block_squares": logs.square().sum(),
    }


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add sums to others, in place."""
    for name, value in more.items():
        if name.endswith(_LARGEST):
            # max() would drop a NaN that comes second.
            total[name] = value if math.isnan(value) else max(total.get(name, 0.0), value)
        else:
            total[name] = total.get(name, 0.0) + value


def figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute a layer's figures from its sums, by ``GEMM/ROLE/figure`` and ``GEMM/figure``."""
    found: dict[str, float] = {}
    for gemm, roles in GEMM_ROLES.items():
        for role in roles:
            of = _under(sums, f"{gemm}/{role}/")
            if of:
                figure = _operand_figures(of)
                found |= {f"{gemm}/{role}/{name}": value for name, value in figure.items()}
        of = _under(sums, f"{gemm}/")
        if "noise" in of:
            found[f"{gemm}/error"] = math.sqrt(_ratio(of["noise"], of["signal"]))
        if "foldable" in of:
            found[f"{gemm}/folded"] = _ratio(of["folded"], of["foldable"])
    return found


def _operand_figures(of: Mapping[str, float]) -> dict[str, float]:
    exact = of["noise"] == 0
    found = {
        "sqnr_db": math.inf if exact else 10 * math.log10(_ratio(of["signal"], of["noise"])),
        "flushed": _ratio(of["flushed"], of["nonzero"]),
        "saturated": _ratio(of["saturated"], of["values"]),
        "amax": of["amax"],
        NONFINITE: of[NONFINITE],
    }
    if of.get("blocks"):
        mean = of["block_logs"] / of["blocks"]
        variance = max(0.0, of["block_squares"] / of["blocks"] - mean**2)
        found["block_spread"] = math.sqrt(variance)
    return found


def _under(sums: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in sums.items() if k.startswith(prefix)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _energy(x: Tensor) -> Tensor:
    return x.double().square().sum()


def _number(value: int, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.device)
