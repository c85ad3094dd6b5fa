"""Precision of one linear layer: how each operand of its three GEMMs is quantized."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_lowbit.numerics.delayed_scaling import DelayedScaling
from megatron_lowbit.numerics.gemm import Accumulation
from megatron_lowbit.numerics.gemms import GEMM_ROLES, OPERANDS, Gemm, Role
from megatron_lowbit.numerics.hadamard import Hadamard
from megatron_lowbit.numerics.plan import LinearPlan, make_plan
from megatron_lowbit.numerics.quantizer import Quantizer, Request, Rounding


@dataclass(frozen=True)
class GemmPrecision:
    """Precision of one GEMM: a quantizer for each operand (None: high precision) and more.

    ``hadamard`` goes to both operands with the same signs, or the product is another one: it needs
    both to be quantized. ``tensor_scale`` says which amax makes the scale of a tensor that tensor
    parallelism shards: the local ``shard``'s, or the maximum over the ``group``, which gives every
    layout the same quantized bits for one more small all-reduce per operand. ``delayed`` makes
    tensor scales from earlier steps. ``rhs_of_fprop`` of dgrad and wgrad multiplies the values that
    fprop's quantized weight or input has, blocks along fprop's axis, in place of quantizing it
    again: the straight-through estimator. ``requantizes_rhs`` of dgrad and wgrad quantizes those
    values of fprop, in BF16, along its own axis: the backward pass then sees what the forward pass
    multiplied. ``lhs_of_dgrad`` of wgrad multiplies the values that dgrad's quantized gradient has,
    blocks along dgrad's axis. ``fallback`` computes a product that is not finite again from
    operands in high precision. ``hot_channels`` is the share of fprop's channels whose quantization
    errors a second product makes good (``layers/hot_channels.py``). For study: ``accumulation``,
    where None leaves it to the engine; and ``folding``, which may be False to multiply operands
    with power-of-two scales without folding them.
    """

    lhs: Quantizer | None = None
    rhs: Quantizer | None = None
    hadamard: Hadamard | None = None
    tensor_scale: Literal["shard", "group"] = "shard"
    delayed: DelayedScaling | None = None
    accumulation: Accumulation | None = None
    folding: bool = True
    rhs_of_fprop: bool = False
    requantizes_rhs: bool = False
    lhs_of_dgrad: bool = False
    fallback: Literal["bf16"] | None = None
    hot_channels: float | None = None

    def __post_init__(self) -> None:
        if self.hot_channels is not None:
            if self.lhs is None or self.rhs is None:
                raise ValueError("hot_channels needs both operands of its GEMM quantized")
            if self.hadamard is not None or self.lhs.splits_mean:
                raise ValueError("hot_channels: not with a hadamard transform or split_mean")
        if self.hadamard is not None and (self.lhs is None or self.rhs is None):
            raise ValueError("a hadamard transform needs both operands of its GEMM quantized")
        if self.hadamard is not None and any(side.splits_mean for side in self.sides if side):
            raise ValueError("split_mean: not with a hadamard transform")
        if self.rhs_of_fprop and self.requantizes_rhs:
            raise ValueError("requantize: axis fprop takes fprop's values as they are")
        if self.fallback and (self.uses_fprop or self.lhs_of_dgrad):
            same_axis = "axis fprop" if self.rhs_of_fprop else "axis dgrad"
            reuse = "requantize" if self.requantizes_rhs else same_axis
            raise ValueError(f"fallback: {reuse} keeps no operand in high precision")

    @property
    def sides(self) -> tuple[Quantizer | None, Quantizer | None]:
        """Quantizers of the left and the right operand."""
        return self.lhs, self.rhs

    @property
    def quantized(self) -> bool:
        """True if any operand is quantized."""
        return self.lhs is not None or self.rhs is not None

    @property
    def keeps_sources(self) -> bool:
        """True if the GEMM may read its operands in high precision."""
        return self.fallback is not None or self.hot_channels is not None

    @property
    def uses_fprop(self) -> bool:
        """True if the right operand is made from fprop's quantized one."""
        return self.rhs_of_fprop or self.requantizes_rhs

    @property
    def dequantizes(self) -> bool:
        """True if an operand is multiplied as FP32 values, which no tensor cores take.

        Values of another GEMM's operand, and those with a mean, are, unless they are exact in BF16:
        with scales of rows, which lie along the terms of this GEMM, they are not.
        """
        reused = self.lhs if self.lhs_of_dgrad else None, self.rhs if self.rhs_of_fprop else None
        if any(side is not None and side.format.scales_tensor_rows for side in reused):
            return True
        split = any(side.splits_mean for side in self.sides if side)
        exact = all(side is None or side.format.exact_in_bf16 for side in self.sides)
        return (self.rhs_of_fprop or self.lhs_of_dgrad or split) and not exact

    @property
    def redraws_rhs(self) -> bool:
        """True if each microbatch quantizes the same right operand to other bits."""
        fresh = self.hadamard is not None and self.hadamard.signs == "fresh"
        return _is_stochastic(self.rhs) or fresh

    def __str__(self) -> str:
        if not self.quantized and self.accumulation is None:
            return "bf16"
        sides = " x ".join(side(quantizer) for quantizer in self.sides)
        return ", ".join([sides, *self.extras()])

    def extras(self) -> Iterator[str]:
        """Describe what both operands share, one phrase each."""
        if self.hadamard is not None:
            output = "" if self.hadamard.output == "bf16" else f" {self.hadamard.output}"
            signs = "" if self.hadamard.signs == "fixed" else f" signs {self.hadamard.signs}"
            yield f"RHT-{self.hadamard.size}{output}{signs}"
        if self.tensor_scale == "group" and any(s and s.format.tensor_scaled for s in self.sides):
            yield "group scale"
        if self.rhs_of_fprop:
            yield "right of fprop"
        if self.requantizes_rhs:
            yield "right requantized"
        if self.lhs_of_dgrad:
            yield "left of dgrad"
        if self.delayed is not None:
            yield f"delayed {self.delayed.algorithm}-{self.delayed.length}"
        if self.accumulation is not None:
            every = self.accumulation.promote_every
            yield f"{self.accumulation.inner} sums" + (f" of {every}" if every else "")
        if not self.folding:
            yield "not folded"
        if self.fallback is not None:
            yield f"else {self.fallback}"
        if self.hot_channels is not None:
            yield f"hot channels {self.hot_channels:g}"


def side(quantizer: Quantizer | None) -> str:
    """Describe one operand, such as ``mxfp4 three_quarters SR``; ``bf16`` is high precision."""
    if quantizer is None:
        return "bf16"
    mean = "mean + " if quantizer.splits_mean else ""
    return mean + str(quantizer.format) + (" SR" if _is_stochastic(quantizer) else "")


def _is_stochastic(quantizer: Quantizer | None) -> bool:
    return quantizer is not None and quantizer.rounding is Rounding.STOCHASTIC


class OperandPrecision(NamedTuple):
    """An operand of a GEMM and its quantizer."""

    gemm: Gemm
    role: Role
    quantizer: Quantizer | None


@dataclass(frozen=True)
class LinearPrecision:
    """Precision of one linear layer: its three GEMMs.

    What follows from them is cached: each call of a layer asks for it many times.
    """

    fprop: GemmPrecision = GemmPrecision()
    dgrad: GemmPrecision = GemmPrecision()
    wgrad: GemmPrecision = GemmPrecision()

    def __post_init__(self) -> None:
        self._check_use_of_fprop()
        wgrad, dgrad = self.wgrad, self.dgrad
        if wgrad.lhs_of_dgrad and (wgrad.lhs != dgrad.lhs or wgrad.hadamard or dgrad.hadamard):
            raise ValueError(
                "wgrad.grad: axis dgrad takes dgrad's quantized values, so that format and "
                "rounding are dgrad's, and neither GEMM has a hadamard"
            )
        for gemm, role, quantizer in self.operands():
            axis = Gemm.FPROP if role == Role.INPUT else Gemm.DGRAD
            reused = wgrad.rhs_of_fprop if role == "input" else wgrad.lhs_of_dgrad
            splits = quantizer is not None and quantizer.splits_mean
            scales_rows = quantizer is not None and quantizer.format.scales_tensor_rows
            if role == Role.WEIGHT and (splits or scales_rows):
                option = "split_mean" if splits else "row_scaled"
                raise ValueError(f"{gemm}.weight: {option} is for input and grad")
            if splits and gemm == Gemm.WGRAD and not reused:
                raise ValueError(f"wgrad.{role}: split_mean needs axis {axis} in wgrad")

    def _check_use_of_fprop(self) -> None:
        for name in (Gemm.DGRAD, Gemm.WGRAD):
            gemm, role = self.gemms[name], GEMM_ROLES[name][1]
            of_fprop = self.quantizer(Gemm.FPROP, role)
            if gemm.rhs_of_fprop and (gemm.rhs != of_fprop or gemm.hadamard or self.fprop.hadamard):
                raise ValueError(
                    f"{name}.{role}: axis fprop takes fprop's quantized values, so "
                    "that format and rounding are fprop's, and neither GEMM has a hadamard"
                )
            if gemm.requantizes_rhs and (of_fprop is None or self.fprop.hadamard):
                raise ValueError(
                    f"{name}.{role}: requantize takes fprop's quantized values, so that fprop "
                    "quantizes them, without a hadamard"
                )

    def __str__(self) -> str:
        return ", ".join(f"{name}=({gemm})" for name, gemm in self.gemms.items())

    def __repr__(self) -> str:
        return f"LinearPrecision({self})"

    @cached_property
    def gemms(self) -> dict[Gemm, GemmPrecision]:
        """The GEMMs by name."""
        return {gemm: getattr(self, gemm) for gemm in GEMM_ROLES}

    def quantizer(self, gemm: Gemm, role: Role) -> Quantizer | None:
        """Return the quantizer of an operand, None where it stays in high precision."""
        precision = self.gemms[gemm]
        return precision.lhs if role == GEMM_ROLES[gemm][0] else precision.rhs

    def plan(
        self, training: bool = True, split_tokens: int = 0, saves_input: bool = False
    ) -> LinearPlan:
        """Return the source and form of each operand; computed once.

        Args:
            training: True if a backward pass follows.
            split_tokens: tokens of this rank that sequence parallelism gathers; 0 if unsplit.
            saves_input: save the input itself for wgrad, in place of codes.
        """
        asked = training, split_tokens, saves_input
        if asked not in self._plans:
            self._plans[asked] = make_plan(self, *asked)
        return self._plans[asked]

    @cached_property
    def _plans(self) -> dict[tuple[bool, int, bool], LinearPlan]:
        return {}

    def request(
        self, gemm: Gemm, role: Role, needs_codes: bool = False, saved: bool = False
    ) -> Request | None:
        """Return the request for an operand, without keys; None where it is not quantized."""
        asked = gemm, role, needs_codes, saved
        if asked not in self._requests:
            self._requests[asked] = self._make_request(*asked)
        return self._requests[asked]

    @cached_property
    def _requests(self) -> dict[tuple[str, str, bool, bool], Request | None]:
        return {}

    def _make_request(
        self, gemm: Gemm, role: Role, needs_codes: bool, saved: bool
    ) -> Request | None:
        quantizer, precision = self.quantizer(gemm, role), self.gemms[gemm]
        if quantizer is None:
            return None
        left = role == GEMM_ROLES[gemm][0]
        partner = precision.rhs if left else precision.lhs
        transposed = self.dgrad.lhs if role == "weight" else None
        dequantized_later = precision.accumulation is not None or precision.rhs_of_fprop
        return Request(
            quantizer,
            hadamard=precision.hadamard,
            partner=None if partner is None else partner.format,
            transpose_partner=None if transposed is None else transposed.format,
            left=left,
            needs_codes=needs_codes or dequantized_later,
            saved=saved,
            folding=precision.folding,
        )

    @cached_property
    def weight_serves_dgrad(self) -> bool:
        """True if fprop's quantized weight is dgrad's too: square blocks, same rounding."""
        fprop, dgrad = self.fprop, self.dgrad
        weight = fprop.rhs
        same_scale = (fprop.tensor_scale, fprop.delayed) == (dgrad.tensor_scale, dgrad.delayed)
        return (
            weight is not None
            and weight == dgrad.rhs
            and not dgrad.requantizes_rhs
            and weight.format.square
            and weight.rounding is Rounding.NEAREST_EVEN
            and fprop.hadamard is None
            and dgrad.hadamard is None
            and (same_scale or not weight.format.tensor_scaled)
        )

    @cached_property
    def caches_weight(self) -> bool:
        """True if the quantized weight's bits are the same in every microbatch of a step.

        They are under delayed scaling, whose histories change between steps.
        """
        return not any(gemm.rhs and gemm.redraws_rhs for gemm in (self.fprop, self.dgrad))

    @property
    def weight_in_one_set(self) -> bool:
        """True if dgrad's weight is made from the codes of fprop's."""
        return self.weight_serves_dgrad or self.dgrad.rhs_of_fprop

    @property
    def storage_obstacle(self) -> str | None:
        """Reason why codes cannot replace the stored weight; None if they can."""
        if self.fprop.rhs is None or self.dgrad.rhs is None:
            return "fprop or dgrad takes the weight in high precision"
        if not self.caches_weight:
            return "each microbatch quantizes the weight to other bits"
        if self.fprop.delayed or self.dgrad.delayed:
            return "the weight is under delayed scaling, whose histories layers keep"
        if self.dgrad.requantizes_rhs:
            return "dgrad requantizes the weight"
        if self.keeps_sources:
            return "fallback and hot_channels need the weight in high precision"
        return None

    @cached_property
    def quantized(self) -> bool:
        """True if any operand is quantized."""
        return any(precision.quantized for precision in self.gemms.values())

    @cached_property
    def stochastic(self) -> bool:
        """True if any GEMM needs random bits, for rounding or for fresh signs."""
        fresh = any(p.hadamard and p.hadamard.signs == "fresh" for p in self.gemms.values())
        return fresh or any(_is_stochastic(operand.quantizer) for operand in self.operands())

    def without_requantize(self) -> "LinearPrecision":
        """Return the precision with weights and inputs quantized themselves in each GEMM."""
        dgrad, wgrad = (replace(gemm, requantizes_rhs=False) for gemm in (self.dgrad, self.wgrad))
        return replace(self, dgrad=dgrad, wgrad=wgrad)

    @property
    def shares_operands(self) -> bool:
        """True if a GEMM takes an operand that is made from another GEMM's quantized one."""
        return self.dgrad.uses_fprop or self.wgrad.uses_fprop or self.wgrad.lhs_of_dgrad

    @cached_property
    def falls_back(self) -> bool:
        """True if any GEMM has a fallback."""
        return any(precision.fallback for precision in self.gemms.values())

    @cached_property
    def keeps_sources(self) -> bool:
        """True if any GEMM may read its operands in high precision."""
        return any(precision.keeps_sources for precision in self.gemms.values())

    @cached_property
    def history_length(self) -> int:
        """Number of steps whose amaxes delayed scaling keeps; 0 without it."""
        return max(p.delayed.recorded if p.delayed else 0 for p in self.gemms.values())

    def operands(self) -> Iterator[OperandPrecision]:
        """Yield all six operands, in the order of ``OPERANDS``."""
        for gemm, role in OPERANDS:
            yield OperandPrecision(gemm, role, self.quantizer(gemm, role))


HIGH_PRECISION = LinearPrecision()
