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
from megatron_lowbit.layers.fallback import without_source
from megatron_lowbit.layers.operands import requantized
from megatron_lowbit.numerics import QuantizedTensor, Request, hadamard_transform
from megatron_lowbit.numerics.formats import decode, unpack_nibbles
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm, Role
from megatron_lowbit.numerics.plan import Source

Sums = dict[str, Tensor]
"""Scalars of FP64 on the device, by name; ``*/amax`` are maxima, all others sums."""
NONFINITE = "nonfinite"
"""Name, after the operand's, of the number of values that are infinite or NaN."""


def gemm_sums(context: LinearContext, gemm: Gemm, lhs: Tensor, rhs: Tensor) -> Sums:
    """Measure one GEMM lhs (A, L) . rhs (B, L)^T: its operands and its output.

    ``lhs`` and ``rhs`` are in high precision, transposed as the GEMM contracts them. The result is
    empty where the recipe quantizes neither.
    """
    sums: Sums = {}
    operands: list[Any] = []
    for role, x in zip(GEMM_ROLES[gemm], (lhs, rhs), strict=True):
        operand, measured = _measured(context, gemm, role, x)
        operands.append(context.with_source(gemm, operand, x) if measured else operand)
        sums |= {f"{role}/{name}": value for name, value in measured.items()}
    if not sums:
        return {}
    exact = lhs.float() @ rhs.float().t()
    left, right = operands
    error = context.gemm(gemm, left, right, torch.float32) - exact
    inexact, values = context.engine.fold_losses(*map(without_source, operands))
    sums |= {"signal": _energy(exact), "noise": _energy(error)}
    if values:
        sums |= {"folded": _number(inexact, lhs), "foldable": _number(values, lhs)}
    return {f"{gemm}/{name}": value for name, value in sums.items()}


def _measured(context: LinearContext, gemm: Gemm, role: Role, x: Tensor) -> tuple[Any, Sums]:
    """Return the GEMM's operand and its sums, which are empty for one that is not quantized.

    Values of another GEMM's operand are measured along the axis of that GEMM.
    """
    source, origin = context.plan()[gemm, role].source, gemm
    if source is Source.DEQUANTIZED:
        x, origin = x.t(), Gemm.DGRAD if role == Role.GRAD else Gemm.FPROP
    if source is Source.REQUANTIZED:
        forward, _ = context.quantize(x.t(), role, Gemm.FPROP, None, needs_codes=True)
        quantized = requantized(context, role, forward)
    else:
        quantized, _ = context.quantize(x, role, origin, None, needs_codes=True)
    quantized, request = without_source(quantized), context.request(origin, role, len(x))
    # The context transposes fprop's operands itself.
    transposes = source is Source.DEQUANTIZED and origin == Gemm.DGRAD
    operand = quantized.dequantize().t() if transposes else quantized
    return operand, {} if request is None else operand_sums(x, quantized, request)


def operand_sums(x: Tensor, quantized: QuantizedTensor, request: Request) -> Sums:
    """Measure the quantization of x (R, L) along its last axis."""
    exact = x.float()
    if request.hadamard is not None:
        exact = hadamard_transform(x, request.hadamard, request.sign_key)
    values, element = quantized.dequantize(), quantized.format.element
    codes = unpack_nibbles(quantized.codes) if element.bits == 4 else quantized.codes
    at_end = decode(codes.flatten(1), element).abs()[:, : values.shape[1]] == element.max
    mean = 0.0 if quantized.mean is None else quantized.mean
    beyond = (exact - mean).abs() > (values - mean).abs()
    sums = {
        "signal": _energy(exact),
        "noise": _energy(values - exact),
        "values": _number(exact.numel(), x),
        "nonzero": (exact != 0).sum().double(),
        "flushed": ((exact != 0) & (values == 0)).sum().double(),
        "saturated": (at_end & beyond).sum().double(),
        "amax": x.abs().amax().double(),
        NONFINITE: (~x.isfinite()).sum().double(),
    }
    block = quantized.format.block
    if 1 < block < exact.shape[1]:
        # For the spread of the blocks' amaxes; there is none for one block per row.
        amaxes = F.pad(exact, (0, -exact.shape[1] % block)).unflatten(1, (-1, block)).abs().amax(-1)
        logs = amaxes[amaxes > 0].double().log2()
        sums |= {
            "blocks": _number(logs.numel(), x),
            "block_logs": logs.sum(),
            "block_squares": logs.square().sum(),
        }
    return sums


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add sums to others, in place."""
    for name, value in more.items():
        if name.endswith("amax"):
            # max() would drop a NaN that comes second.
            total[name] = value if math.isnan(value) else max(total.get(name, 0.0), value)
        else:
            total[name] = total.get(name, 0.0) + value


def figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute a layer's figures from its sums, by ``GEMM/ROLE/figure`` and ``GEMM/figure``."""
    result: dict[str, float] = {}
    for gemm, roles in GEMM_ROLES.items():
        for role in roles:
            if operand := _under(sums, f"{gemm}/{role}/"):
                figures_of_role = _operand_figures(operand)
                result |= {f"{gemm}/{role}/{k}": v for k, v in figures_of_role.items()}
        output = _under(sums, f"{gemm}/")
        if "noise" in output:
            result[f"{gemm}/error"] = math.sqrt(_ratio(output["noise"], output["signal"]))
        if "foldable" in output:
            result[f"{gemm}/folded"] = _ratio(output["folded"], output["foldable"])
    return result


def _operand_figures(sums: Mapping[str, float]) -> dict[str, float]:
    result = {
        "sqnr_db": _decibels(sums["signal"], sums["noise"]),
        "flushed": _ratio(sums["flushed"], sums["nonzero"]),
        "saturated": _ratio(sums["saturated"], sums["values"]),
        "amax": sums["amax"],
        NONFINITE: sums[NONFINITE],
    }
    if sums.get("blocks"):
        mean = sums["block_logs"] / sums["blocks"]
        variance = max(0.0, sums["block_squares"] / sums["blocks"] - mean**2)
        result["block_spread"] = math.sqrt(variance)
    return result


def _decibels(signal: float, noise: float) -> float:
    ratio = _ratio(signal, noise) if noise else math.inf
    # 0 if a decoded value has overflowed.
    return 10 * math.log10(ratio) if ratio else -math.inf


def _under(sums: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in sums.items() if k.startswith(prefix)}


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0


def _energy(x: Tensor) -> Tensor:
    return x.double().square().sum()


def _number(value: int, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.device)
