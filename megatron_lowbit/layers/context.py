"""Context of one call of a linear layer: quantizes its operands and multiplies them.

Shared by this project's linear layers and by Transformer Engine's, which bring a loop of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.kernels.engine import Engine, Into, Transposed, accumulate_into
from megatron_lowbit.layers.fallback import WithSource, recompute_unless_finite, without_source
from megatron_lowbit.layers.hot_channels import add_hot_channels
from megatron_lowbit.layers.sharding import UNSHARDED, Shards
from megatron_lowbit.numerics import (
    Amaxes,
    AmaxHistory,
    DelayedAmax,
    Request,
    Rounding,
    ScaleAmaxes,
)
from megatron_lowbit.numerics.gemms import GEMM_ROLES, OPERANDS, Gemm, Role
from megatron_lowbit.numerics.plan import LinearPlan, Source
from megatron_lowbit.numerics.precision import LinearPrecision
from megatron_lowbit.numerics.randomness import Key, sign_key


@dataclass
class WeightCache:
    """Cached quantized weight, for fprop and dgrad. Reset to None whenever the weight changes.

    ``stored``: True if new codes are written in place: where they are all that a rank keeps of the
    weight, and where CUDA graphs read them.
    """

    operands: tuple[Any, Any] | None = None
    stored: bool = False

    def forget(self) -> None:
        """Discard the quantized weight, unless it is stored."""
        if not self.stored:
            self.operands = None


@dataclass(frozen=True)
class LinearContext:
    """Everything about one call of a linear layer that is not a tensor to differentiate.

    Args:
        precision: how each operand of each GEMM is quantized.
        engine: where the arithmetic runs.
        key: of stochastic rounding and of fresh signs, in forward and backward.
        training: True if a backward pass follows.
        shards: how tensor parallelism splits the layer.
        accumulate_main_grad: add dW to ``weight.main_grad`` (where the weight has one), as
            megatron-core's DistributedDataParallel expects of fused accumulation.
        main_grad_beta: False to write dW there, True to add it, in CUDA graphs. None to look at
            what DistributedDataParallel notes on the weight.
        amax_history: the state of delayed scaling, a row for each of ``recipes.OPERANDS``; read,
            and written in training. Whoever owns it ends its steps.
        weight_cache: keeps the quantized weight for the next call, in training.
        fallbacks: int64 (3,); for each of fprop, dgrad and wgrad, the number of products that were
            not finite and were computed again in high precision is added.
        saves_input: keep the input itself for wgrad, which then quantizes it, in place of codes.
        scaled_with: further weights (N', K) that share the weight's tensor scales, made from the
            largest amax of all.
    """

    precision: LinearPrecision
    engine: Engine
    key: Key
    training: bool = True
    shards: Shards = UNSHARDED
    accumulate_main_grad: bool = False
    main_grad_beta: bool | None = None
    amax_history: AmaxHistory | None = None
    weight_cache: WeightCache | None = None
    fallbacks: Tensor | None = None
    saves_input: bool = False
    scaled_with: Sequence[Tensor] = ()

    def plan(self, tokens: int = 0) -> LinearPlan:
        """Return the plan of a call with so many input tokens on this rank."""
        split_tokens = tokens if self.shards.sequence_parallel else 0
        return self.precision.plan(self.training, split_tokens, self.saves_input)

    def quantize(
        self,
        x: Tensor,
        role: Role,
        row: Gemm | None,
        col: Gemm | None,
        needs_codes: bool = False,
        amax: Tensor | None = None,
    ) -> tuple[Any, Any]:
        """Quantize x (R, C) for the GEMMs that contract its columns and its rows.

        Args:
            x: the operand of that ``role``, in high precision.
            row: GEMM that contracts columns, or None.
            col: GEMM that contracts rows, or None. A weight in square blocks is quantized once for
                both where the plan says so.
            needs_codes: True for codes even where the plan takes any form.
            amax: x's own, FP32 (), where it is known.

        Returns:
            Operands for the engine's GEMM. A side that is None or stays in high precision is x, or
            its transpose.
        """
        rows, by_row, by_col = x.shape[0], None, None
        if row is not None:
            by_row = self.request(row, role, rows, needs_codes)
        if row and col and self.plan()[col, role].source is Source.TRANSPOSE:
            by_col = by_row
        elif col is not None:
            by_col = self.request(col, role, rows, needs_codes)
        if by_row is None and by_col is None:
            return x, x.t()
        amaxes = self._scale_amaxes(x, role, row, col, (by_row, by_col))
        if amax is not None:
            first, second = (
                amax if scale is None and request and request.takes_tensor_amax else scale
                for scale, request in zip(amaxes, (by_row, by_col), strict=True)
            )
            amaxes = first, second
        left, right = self.engine.quantize(x, by_row, by_col, amaxes)
        return (
            x if by_row is None else self.with_source(row, left, x),
            x.t() if by_col is None else self.with_source(col, right, x.t()),
        )

    def with_source(self, gemm: Gemm | None, operand: Any, source: Tensor) -> Any:
        """Return an operand with the tensor in high precision where its GEMM may read it."""
        keeps = gemm is not None and self.precision.gemms[gemm].keeps_sources
        return WithSource(operand, source) if keeps else operand

    def request(
        self, gemm: Gemm, role: Role, rows: int, needs_codes: bool = False
    ) -> Request | None:
        """Return the request for an operand of so many rows; None for high precision."""
        plan = self.plan(rows)[gemm, role]
        request = self.precision.request(gemm, role, needs_codes or plan.codes, plan.stays)
        if request is None or not request.takes_keys:
            return request
        transform, draw = request.hadamard, None
        signs: Key = 0
        if request.quantizer.rounding is Rounding.STOCHASTIC:
            size = transform.size if transform else 1
            draw = self.shards.draw(self.key, gemm, role, rows, size)
        if transform is not None and transform.signs == "fresh":
            signs = sign_key(self.key, gemm)
        return request.with_keys(signs, draw)

    def _scale_amaxes(
        self,
        x: Tensor,
        role: Role,
        row: Gemm | None,
        col: Gemm | None,
        requests: tuple[Request | None, Request | None],
    ) -> ScaleAmaxes:
        """Return the amaxes of both sides' tensor scales; None where x alone decides them."""
        if role == Role.WEIGHT and self.scaled_with:
            amaxes = [self.engine.amaxes(weight, *requests) for weight in (x, *self.scaled_with)]
            row_amaxes, col_amaxes = zip(*amaxes, strict=True)
            return _largest(row_amaxes), _largest(col_amaxes)
        if not self.shards.roles and not self.precision.history_length:
            return None, None
        shared = [gemm for gemm in (row, col) if gemm and self.shares_amax(gemm, role)]
        if not shared:
            return None, None
        current: Amaxes = None, None
        if any(self._reduces_amax(gemm, role) for gemm in shared):
            current = self.engine.amaxes(x, *requests)

        def scale_amax(gemm: Gemm | None, amax: Tensor | None) -> Tensor | DelayedAmax | None:
            if gemm is None or gemm not in shared:
                return amax
            if amax is None:
                return self._delayed_amax(gemm, role)
            return self.scale_amax(gemm, role, amax)

        by_row = scale_amax(row, current[0])
        return by_row, by_row if requests[0] is requests[1] else scale_amax(col, current[1])

    def shares_amax(self, gemm: Gemm, role: Role) -> bool:
        """Return True if a tensor scale depends on more than the local tensor."""
        quantizer, precision = self.precision.quantizer(gemm, role), self.precision.gemms[gemm]
        if quantizer is None or not quantizer.format.tensor_scaled:
            return False
        return precision.delayed is not None or self._reduces_amax(gemm, role)

    def _reduces_amax(self, gemm: Gemm, role: Role) -> bool:
        group = self.precision.gemms[gemm].tensor_scale == "group"
        split_tokens = role == Role.INPUT and self.shards.sequence_parallel
        return (group or split_tokens) and role in self.shards.roles

    def scale_amax(self, gemm: Gemm, role: Role, amax: Tensor) -> Tensor:
        """Reduce and record the amax of a local tensor; return the amax of its tensor scale."""
        if self._reduces_amax(gemm, role):
            amax = self.shards.max_over_group(amax)
        delayed = self._delayed_amax(gemm, role)
        return amax if delayed is None else delayed.resolve(amax)

    def _delayed_amax(self, gemm: Gemm, role: Role) -> DelayedAmax | None:
        """Return the amax of earlier steps where scaling is delayed. ValueError without history."""
        rule = self.precision.gemms[gemm].delayed
        if rule is None:
            return None
        if self.amax_history is None:
            raise ValueError("delayed scaling needs an amax_history")
        return self.amax_history.amax(OPERANDS.index((gemm, role)), rule, self.training)

    def gemm(
        self,
        name: Gemm,
        lhs: Any,
        rhs: Any,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        into: Into = None,
    ) -> Tensor:
        """Compute one of the three products in ``dtype``; ``into`` is as for :meth:`Engine.gemm`.

        ``rhs`` is fprop's operand where dgrad or wgrad takes its values. Each rank falls back for
        its own product, before products are summed over ranks.
        """
        precision, engine = self.precision.gemms[name], self.engine
        left, right = without_source(lhs), without_source(rhs)
        if isinstance(right, Transposed):  # stored codes: as this engine multiplies them
            right = engine.transposed(right.of)
        if self.plan()[name, GEMM_ROLES[name][1]].source is Source.DEQUANTIZED:
            right = engine.transpose(right, left)
        if into is not None and precision.accumulation is None and not precision.keeps_sources:
            return engine.gemm(left, right, None, None, torch.float32, precision.folding, into)
        y = engine.gemm(left, right, bias, precision.accumulation, dtype, precision.folding)
        if precision.hot_channels is not None:
            y = add_hot_channels(y, lhs, rhs, precision.hot_channels)
        if precision.fallback is not None:
            count = None if self.fallbacks is None else self.fallbacks[list(GEMM_ROLES).index(name)]
            y = recompute_unless_finite(y, lhs, rhs, bias, count)
        return y if into is None else accumulate_into(*into, y)


def _largest(amaxes: Sequence[Tensor | None]) -> Tensor | None:
    """Return the largest of FP32 scalars, NaN if one is NaN; None if there are none."""
    known = [amax for amax in amaxes if amax is not None]
    return torch.stack(known).amax() if known else None


def draw_key(precision: LinearPrecision) -> int:
    """Return a key from torch's default CPU generator, where a call needs one.

    Drawing a key that nothing uses would shift the random numbers of dropout.
    """
    return int(torch.randint(2**63 - 1, ())) if precision.stochastic else 0
