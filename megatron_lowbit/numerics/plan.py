"""Plan of a linear layer: source and form of each operand of its three GEMMs.

All that follows from a precision, from how tokens are split over ranks and from whether a backward
pass follows is decided here, once. Layers follow the plan; the planner of memory and time reads it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.quantizer import Quantizer, Rounding
from megatron_lowbit.numerics.randomness import GROUP

if TYPE_CHECKING:
    from megatron_lowbit.numerics.precision import LinearPrecision


class Source(StrEnum):
    """Tensor that an operand is made from."""

    TENSOR = "tensor"
    """The input, weight or gradient, along the axis that the GEMM contracts."""
    TRANSPOSE = "transpose"
    """Fprop's weight in square blocks: dgrad's has the same bits."""
    DEQUANTIZED = "dequantized"
    """The values of fprop's operand, or of dgrad's gradient, along that one's axis."""
    REQUANTIZED = "requantized"
    """The values of fprop's operand in BF16, quantized again."""


class Saved(StrEnum):
    """Tensor that forward saves for an operand of backward."""

    OPERAND = "operand"
    """The operand itself, quantized."""
    FPROP = "fprop"
    """Fprop's operand, quantized."""
    TENSOR = "tensor"
    """The tensor in high precision, which backward quantizes."""


@dataclass(frozen=True)
class OperandPlan:
    """Plan of one operand.

    Attributes:
        quantizer: format and rounding; None for high precision.
        source: tensor that it is made from.
        saved: tensor that forward saves for it; None for an operand of fprop, for gradients, and
            where no backward pass follows.
        stays: True if it is in memory after its GEMM, so that its form takes no more than codes do.
        codes: True if it is gathered, transposed or dequantized as codes. Any other an engine may
            write in the form that its GEMM takes.
        gathers_codes: True if sequence parallelism gathers it quantized, False if it gathers the
            tensor in high precision.
    """

    quantizer: Quantizer | None
    source: Source = Source.TENSOR
    saved: Saved | None = None
    stays: bool = False
    codes: bool = False
    gathers_codes: bool = False


LinearPlan = Mapping[tuple[Gemm, Role], OperandPlan]
"""Plans of the six operands, in the order of ``OPERANDS``."""


def make_plan(
    precision: "LinearPrecision", training: bool, split_tokens: int, saves_input: bool
) -> LinearPlan:
    """Plan a linear layer, as :meth:`LinearPrecision.plan` says."""
    dgrad, wgrad = precision.dgrad, precision.wgrad
    fprop_input, wgrad_input = _inputs(precision, training, split_tokens, saves_input)
    fprop_weight, dgrad_weight = _weights(precision, training)
    of_dgrad = wgrad.lhs_of_dgrad
    grad_source = Source.DEQUANTIZED if of_dgrad else Source.TENSOR
    return {
        (Gemm.FPROP, Role.INPUT): fprop_input,
        (Gemm.FPROP, Role.WEIGHT): fprop_weight,
        (Gemm.DGRAD, Role.GRAD): OperandPlan(dgrad.lhs, codes=of_dgrad),
        (Gemm.DGRAD, Role.WEIGHT): dgrad_weight,
        (Gemm.WGRAD, Role.GRAD): OperandPlan(wgrad.lhs, grad_source),
        (Gemm.WGRAD, Role.INPUT): wgrad_input,
    }


def _inputs(
    precision: "LinearPrecision", training: bool, split_tokens: int, saves_input: bool
) -> tuple[OperandPlan, OperandPlan]:
    fprop, wgrad = precision.fprop, precision.wgrad
    source, split = _source(wgrad.rhs_of_fprop, wgrad.requantizes_rhs), split_tokens > 0
    reuses = source is not Source.TENSOR
    gathers = (
        split and not fprop.keeps_sources and _gathers_codes(precision, Gemm.FPROP, split_tokens)
    )
    saved = Saved.TENSOR
    if not saves_input and reuses and (gathers or not split):
        saved = Saved.FPROP
    elif not (saves_input or reuses or wgrad.rhs is None or wgrad.keeps_sources) and (
        not split or _gathers_codes(precision, Gemm.WGRAD, split_tokens)
    ):
        saved = Saved.OPERAND
    saves_own, reused = saved is Saved.OPERAND, training and saved is Saved.FPROP
    return (
        OperandPlan(fprop.lhs, codes=gathers or reused, gathers_codes=gathers),
        OperandPlan(
            wgrad.rhs,
            source,
            saved if training else None,
            stays=saves_own,
            codes=split and saves_own,
            gathers_codes=split and saved is not Saved.TENSOR,
        ),
    )


def _weights(precision: "LinearPrecision", training: bool) -> tuple[OperandPlan, OperandPlan]:
    fprop, dgrad, cached = precision.fprop, precision.dgrad, precision.caches_weight
    serves = precision.weight_serves_dgrad
    source = Source.TRANSPOSE if serves else _source(dgrad.rhs_of_fprop, dgrad.requantizes_rhs)
    saved = Saved.TENSOR
    if source is Source.DEQUANTIZED:
        saved = Saved.FPROP
    elif serves or (cached and source is Source.TENSOR and dgrad.rhs is not None):
        saved = Saved.OPERAND
    stays = serves or cached
    own = stays and saved is Saved.OPERAND
    of_dgrad = OperandPlan(dgrad.rhs, source, saved if training else None, own)
    return OperandPlan(fprop.rhs, stays=stays, codes=dgrad.rhs_of_fprop), of_dgrad


def _source(values: bool, requantized: bool) -> Source:
    return Source.DEQUANTIZED if values else Source.REQUANTIZED if requantized else Source.TENSOR


def _gathers_codes(precision: "LinearPrecision", gemm: Gemm, tokens: int) -> bool:
    """Return True if a rank's tokens hold whole input blocks, so that codes can be gathered."""
    quantizer = precision.quantizer(gemm, Role.INPUT)
    if quantizer is None or quantizer.splits_mean:
        return False  # a mean is of the tokens of all ranks
    if gemm == Gemm.FPROP:
        return tokens % quantizer.format.block_rows == 0
    if quantizer.format.row_scaled:
        return False  # a scale is made from the tokens of all ranks
    transform = precision.gemms[gemm].hadamard
    units = [quantizer.format.block, transform.size if transform else 1]
    if quantizer.rounding is Rounding.STOCHASTIC:
        units.append(GROUP)  # tokens share a random draw, on both sides of a rank's edge
    return tokens % math.lcm(*units) == 0
