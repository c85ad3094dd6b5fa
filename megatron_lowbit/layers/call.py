"""What one call of a linear layer asks of its operands: each quantized for the GEMMs it is in.

Shared by this project's linear layer and by Transformer Engine's, which brings a loop of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.layers.fallback import recompute_unless_finite
from megatron_lowbit.layers.sharding import UNSHARDED, Shards, gather_rows
from megatron_lowbit.numerics import (
    AmaxHistory,
    Hadamard,
    Operand,
    Quantizer,
    Request,
    Rounding,
    derive_key,
)
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.philox import WORDS
from megatron_lowbit.recipes.precision import GEMM_ROLES, OPERANDS, LinearPrecision


@dataclass
class WeightCache:
    """A weight quantized for fprop and dgrad; who changes the weight sets it to None again."""

    operands: tuple | None = None


@dataclass(frozen=True)
class LinearCall:
    """Everything about one call that is not a tensor to differentiate."""

    precision: LinearPrecision
    engine: Engine
    key: int
    training: bool
    keep_input: bool
    shards: Shards = UNSHARDED
    accumulate_main_grad: bool = False
    operand: Operand | None = None
    amax_history: AmaxHistory | None = None
    weight_cache: WeightCache | None = None
    fallbacks: Tensor | None = None

    def gemm(
        self,
        name: str,
        lhs: Any,
        rhs: Any,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        plain: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One of the three products, in ``dtype``.

        ``plain`` are the operands in high precision, from which a product that is not finite is
        computed again where the recipe says so. Each rank does so with its own product: of one
        that is to be summed over ranks, with its own term.
        """
        precision = self.precision.gemms[name]
        y = self.engine.gemm(lhs, rhs, bias, precision.accumulation, dtype)
        if precision.fallback is None or plain is None:
            return y
        count = None if self.fallbacks is None else self.fallbacks[list(GEMM_ROLES).index(name)]
        return recompute_unless_finite(y, *plain, bias, count)

    def quantizer(self, gemm: str, role: str) -> Quantizer | None:
        precision = self.precision.gemms[gemm]
        return precision.lhs if role == GEMM_ROLES[gemm][0] else precision.rhs

    def hadamard(self, gemm: str) -> Hadamard | None:
        return self.precision.gemms[gemm].hadamard

    def request(self, gemm: str, role: str, tokens: int, *, kept: bool = False) -> Request | None:
        """How an operand is quantized, if the recipe wants it so."""
        quantizer = self.quantizer(gemm, role)
        if quantizer is None:
            return None
        precision = self.precision.gemms[gemm]
        transform, draw = precision.hadamard, None
        if quantizer.rounding is Rounding.STOCHASTIC:
            points = transform.size if transform else 1
            draw = self.shards.draw(self.key, gemm, role, tokens, points)
        other = precision.rhs if role == GEMM_ROLES[gemm][0] else precision.lhs
        return Request(
            quantizer,
            hadamard=transform,
            sign_key=self._sign_key(gemm),
            scale_amax=partial(self._scale_amax, gemm, role),
            draw=draw,
            other=None if other is None else other.format,
            kept=kept or precision.accumulation is not None or precision.rhs_of_fprop,
        )

    def _sign_key(self, gemm: str) -> int:
        """The key of a GEMM's fresh signs; both operands take the same."""
        transform = self.hadamard(gemm)
        fresh = transform is not None and transform.signs == "fresh"
        return derive_key(self.key, "signs", gemm) if fresh else 0

    def quantize(self, x: Tensor, row: Request | None, col: Request | None) -> tuple:
        """x for the GEMM that contracts its columns, and for the one that contracts its rows.

        A side without a request stays x, or its transpose: its GEMM runs in high precision.
        """
        by_row, by_col = None, None
        if row is not None or col is not None:
            by_row, by_col = self.engine.quantize(x, row, col)
        return x if row is None else by_row, x.t() if col is None else by_col

    def _scale_amax(self, gemm: str, role: str, amax: Tensor) -> Tensor:
        """The amax that a tensor's scale is made from, given its own."""
        precision = self.precision.gemms[gemm]
        over_group = precision.tensor_scale == "group" or (
            role == "input" and self.shards.sequence_parallel
        )
        if over_group and role in self.shards.roles:
            amax = self.shards.max_over_group(amax)
        if precision.delayed is None:
            return amax
        if self.amax_history is None:
            raise ValueError("delayed scaling needs an amax_history")
        operand = OPERANDS.index((gemm, role))
        if self.training:
            self.amax_history.record(operand, amax)
        return precision.delayed.amax(self.amax_history.entries[operand], amax)

    def gathers_codes(self, gemm: str, tokens: int) -> bool:
        """Whether this rank's tokens hold whole input blocks, so that codes can be gathered."""
        quantizer = self.quantizer(gemm, "input")
        if quantizer is None:
            return False
        if gemm == "fprop":
            return tokens % quantizer.format.block_rows == 0
        if quantizer.format.row_scaled:
            return False  # a scale is made from the tokens of all ranks
        transform = self.hadamard(gemm)
        whole = [quantizer.format.block, transform.size if transform else 1]
        if quantizer.rounding is Rounding.STOCHASTIC:
            whole.append(WORDS)  # tokens share a random draw, on both sides of a rank's edge
        return tokens % math.lcm(*whole) == 0

    @property
    def weight_serves_dgrad(self) -> bool:
        """Whether fprop's quantized weight is dgrad's too: square blocks, same rounding."""
        fprop = self.quantizer("fprop", "weight")
        return (
            fprop is not None
            and fprop == self.quantizer("dgrad", "weight")
            and fprop.format.square
            and fprop.rounding is Rounding.NEAREST_EVEN
            and self.hadamard("fprop") is None
            and self.hadamard("dgrad") is None
            and self._same_tensor_scale(fprop.format)
        )

    @property
    def caches_weight(self) -> bool:
        """Whether the weight's bits are the same in every microbatch of a step."""
        return all(
            quantizer is None
            or (quantizer.rounding is Rounding.NEAREST_EVEN and not self._is_redrawn(gemm))
            for gemm in ("fprop", "dgrad")
            for quantizer in [self.quantizer(gemm, "weight")]
        )

    def _is_redrawn(self, gemm: str) -> bool:
        """Whether signs are fresh, or amaxes recorded, in each microbatch."""
        precision = self.precision.gemms[gemm]
        fresh = precision.hadamard is not None and precision.hadamard.signs == "fresh"
        return fresh or precision.delayed is not None

    def _same_tensor_scale(self, format: BlockFormat) -> bool:
        """Whether fprop and dgrad make a weight's tensor scale, if there is one, alike."""
        fprop, dgrad = self.precision.fprop, self.precision.dgrad
        return not format.tensor_scaled or (
            fprop.tensor_scale == dgrad.tensor_scale and fprop.delayed == dgrad.delayed
        )


def draw_key(precision: LinearPrecision) -> int:
    """A key from torch's default CPU generator, where a call needs one.

    Drawing a key that nothing uses would shift the random numbers of dropout.
    """
    return int(torch.randint(2**63 - 1, ())) if precision.stochastic else 0


def quantize_input(call: LinearCall, x: Tensor) -> tuple:
    """fprop's input of all tokens, and what wgrad needs of this rank's input (R, K).

    That is its transpose (K, R) quantized, or x itself, or fprop's codes (R, K) where wgrad takes
    their values. Tokens that sequence parallelism splits are gathered as codes where blocks stay
    whole, else in their own precision. A wgrad with a fallback takes x itself.
    """
    sequence_parallel, tokens = call.shards.sequence_parallel, x.shape[0]
    given = call.operand or Operand(None, None, x)
    row = col = None
    here = {g: not sequence_parallel or call.gathers_codes(g, tokens) for g in ("fprop", "wgrad")}
    reused = call.keep_input and call.precision.wgrad.rhs_of_fprop
    keeps_codes = call.keep_input and not reused and not call.precision.wgrad.fallback
    if given.row is None and here["fprop"]:
        row = call.request("fprop", "input", tokens, kept=sequence_parallel or reused)
    if keeps_codes and given.col is None and here["wgrad"]:
        col = call.request("wgrad", "input", tokens, kept=True)
    by_row, by_col = call.quantize(x, row, col)
    by_row = by_row if given.row is None else given.row
    kept = None
    if reused:
        kept = by_row
    elif keeps_codes:
        kept = given.col if given.col is not None else x if col is None else by_col
    elif call.keep_input:
        kept = x
    if not sequence_parallel:
        return by_row, kept
    if row is None and given.row is None:
        return quantize_gathered(call, "fprop", x), kept
    return gather_rows(by_row, call.shards.group), kept


def fprop_input(call: LinearCall, kept: Any) -> Any:
    """fprop's quantized input (M, K) of all tokens again, of what :func:`quantize_input` kept."""
    if not call.shards.sequence_parallel:
        return kept
    if isinstance(kept, Tensor):
        return quantize_gathered(call, "fprop", kept)
    return gather_rows(kept, call.shards.group)


def plain_input(call: LinearCall, x: Tensor) -> Tensor:
    """Return the input of all tokens in its own precision, of this rank's x (R, K)."""
    return gather_rows(x, call.shards.group) if call.shards.sequence_parallel else x


def quantize_gathered(call: LinearCall, gemm: str, x: Tensor) -> Any:
    """Gather x (R, K) in its own precision, then quantize the whole as an unsplit input."""
    return quantize_total(call, gemm, gather_rows(x, call.shards.group))


def quantize_total(call: LinearCall, gemm: str, total: Tensor) -> Any:
    """Quantize the input of all tokens (M, K) as an unsplit one."""
    shards = replace(call.shards, sequence_parallel=False, roles=call.shards.roles - {"input"})
    kept = call.precision.wgrad.rhs_of_fprop
    request = replace(call, shards=shards).request(gemm, "input", total.shape[0], kept=kept)
    if gemm == "fprop":
        return call.quantize(total, request, None)[0]
    return call.quantize(total, None, request)[1]


def reduce_dgrad(shards: Shards, dgrad: Tensor) -> tuple[Tensor, dist.Work | None]:
    """Start summing dX over the group, to run while wgrad computes."""
    if shards.sequence_parallel:
        local = dgrad.new_empty(
            (dgrad.shape[0] // dist.get_world_size(shards.group), dgrad.shape[1])
        )
        return local, dist.reduce_scatter_tensor(local, dgrad, group=shards.group, async_op=True)
    if shards.allreduce_dgrad:
        return dgrad, dist.all_reduce(dgrad, group=shards.group, async_op=True)
    return dgrad, None


def quantize_weight(call: LinearCall, weight: Callable[[], Tensor]) -> tuple:
    """A weight (N, K) for fprop, and its transpose for dgrad: None where backward quantizes it.

    ``weight`` makes it, where it is not in the cache.
    """
    cache = call.weight_cache if call.caches_weight else None
    if cache is not None and cache.operands is not None:
        return cache.operands
    serves_both, reused = call.weight_serves_dgrad, call.precision.dgrad.rhs_of_fprop
    row = call.request("fprop", "weight", 0, kept=serves_both or reused or call.caches_weight)
    col = None
    if call.training and serves_both:
        col = row
    elif call.training and call.caches_weight and not reused:
        col = call.request("dgrad", "weight", 0, kept=True)
    by_row, by_col = call.quantize(weight(), row, col)
    dgrad_weight = None if col is None else by_col
    if call.training and reused and not serves_both:
        dgrad_weight = by_row.dequantize().t()
    operands = by_row, dgrad_weight
    if cache is not None and call.training:
        cache.operands = operands
    return operands


def quantize_grad(call: LinearCall, grad: Tensor, needs_dgrad: bool, needs_wgrad: bool) -> tuple:
    """dY (M, N) for dgrad, and its transpose for wgrad."""
    row = call.request("dgrad", "grad", grad.shape[0]) if needs_dgrad else None
    col = call.request("wgrad", "grad", grad.shape[0]) if needs_wgrad else None
    return call.quantize(grad, row, col)


def deliver_wgrad(
    call: LinearCall, weight: Tensor, wgrad: Callable[[torch.dtype], Tensor]
) -> Tensor:
    """Add dW to ``weight.main_grad`` and return a stand-in, or return dW for autograd to add.

    ``wgrad`` makes dW in the dtype that it is given.
    """
    if not (call.accumulate_main_grad and hasattr(weight, "main_grad")):
        return wgrad(weight.dtype)
    weight.main_grad.add_(wgrad(torch.float32))
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)
