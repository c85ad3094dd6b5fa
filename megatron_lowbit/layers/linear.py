"""One linear layer, three GEMMs, each in the precision that a recipe gives it.

    fprop  Y  (M, N) = X  (M, K) . W  (N, K)^T    blocks along K
    dgrad  dX (M, K) = dY (M, N) . W^T(K, N)^T    blocks along N
    wgrad  dW (N, K) = dY^T(N, M) . X^T(K, M)^T   blocks along tokens M

What wgrad needs of X is quantized in forward and kept packed; a weight in 16x16 blocks is quantized
once and serves fprop and dgrad with the same bits. Nothing here asks which recipe it is.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lowbit.kernels.engine import Engine, select_engine
from megatron_lowbit.layers.sharding import UNSHARDED, Shards, gather_columns, gather_rows
from megatron_lowbit.numerics import (
    AmaxHistory,
    Hadamard,
    Operand,
    QuantizedTensor,
    Quantizer,
    Rounding,
    derive_key,
)
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.philox import WORDS
from megatron_lowbit.recipes.precision import GEMM_ROLES, OPERANDS, LinearPrecision


@dataclass(frozen=True)
class _Call:
    """Everything about one call that is not a tensor to differentiate."""

    precision: LinearPrecision
    engine: Engine
    shards: Shards
    key: int
    accumulate_main_grad: bool
    training: bool
    keep_input: bool
    operand: Operand | None
    amax_history: AmaxHistory | None

    def gemm(self, name: str, lhs: Tensor | QuantizedTensor, rhs, bias=None) -> Tensor:
        accumulation = self.precision.gemms[name].accumulation
        return self.engine.gemm(lhs, rhs, bias, accumulation)

    def quantizer(self, gemm: str, role: str) -> Quantizer | None:
        precision = self.precision.gemms[gemm]
        return precision.lhs if role == GEMM_ROLES[gemm][0] else precision.rhs

    def hadamard(self, gemm: str) -> Hadamard | None:
        return self.precision.gemms[gemm].hadamard

    def quantize(self, gemm: str, role: str, x: Tensor, tokens: int) -> Tensor | QuantizedTensor:
        """An operand with its block axis last, quantized if the recipe wants it so."""
        quantizer = self.quantizer(gemm, role)
        if quantizer is None:
            return x
        transform = self.hadamard(gemm)
        options = {
            "hadamard": transform,
            # Without the role: both operands of a GEMM take the same signs.
            "sign_key": derive_key(self.key, "signs", gemm),
            "scale_amax": partial(self._scale_amax, gemm, role),
        }
        if quantizer.rounding is Rounding.STOCHASTIC:
            points = transform.size if transform else 1
            options["draw"] = self.shards.draw(self.key, gemm, role, tokens, points)
        return self.engine.quantize(quantizer, x, **options)

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
            and fprop.format.block_rows == fprop.format.block
            and fprop.rounding is Rounding.NEAREST_EVEN
            and self.hadamard("fprop") is None
            and self.hadamard("dgrad") is None
            and self._same_tensor_scale(fprop.format)
        )

    def _same_tensor_scale(self, format: BlockFormat) -> bool:
        """Whether fprop and dgrad make a weight's tensor scale, if there is one, alike."""
        fprop, dgrad = self.precision.fprop, self.precision.dgrad
        return not format.tensor_scaled or (
            fprop.tensor_scale == dgrad.tensor_scale and fprop.delayed == dgrad.delayed
        )


class _LowbitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        x2d = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        fprop_weight = call.quantize("fprop", "weight", weight, 0)
        y = call.gemm("fprop", _fprop_input(call, x2d), fprop_weight, bias).to(x.dtype)
        kept_input = _kept_input(call, x2d) if call.keep_input else None
        _keep(ctx, kept_input, fprop_weight if call.weight_serves_dgrad else None)
        # Without the operand: its source would live until backward beside what is kept of it.
        ctx.call = replace(call, operand=None)
        ctx.weight, ctx.x_shape, ctx.has_bias = weight, x.shape, bias is not None
        if call.shards.sequence_parallel:
            return y.view(-1, *x.shape[1:-1], weight.shape[0])
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        call, weight = ctx.call, ctx.weight
        kept_input, fprop_weight = _kept(ctx)
        grad = grad_output.reshape(math.prod(grad_output.shape[:-1]), grad_output.shape[-1])
        dgrad = handle = wgrad = None
        if ctx.needs_input_grad[0]:
            dgrad, handle = _reduce(call.shards, _dgrad(call, grad, weight, fprop_weight))
        if ctx.needs_input_grad[1]:
            wgrad = _deliver_wgrad(call, weight, _wgrad(call, grad, kept_input))
        bias_grad = grad.sum(dim=0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if handle is not None:
            handle.wait()
        return None if dgrad is None else dgrad.view(ctx.x_shape), wgrad, bias_grad, None


def _fprop_input(call: _Call, x: Tensor) -> Tensor | QuantizedTensor:
    """fprop's input, of all tokens: gathered as codes where blocks stay whole."""
    if call.operand is not None and call.operand.row is not None:
        local = call.operand.row
    elif call.shards.sequence_parallel and not call.gathers_codes("fprop", x.shape[0]):
        return _quantize_gathered(call, "fprop", x)
    else:
        local = call.quantize("fprop", "input", x, x.shape[0])
    return gather_rows(local, call.shards.group) if call.shards.sequence_parallel else local


def _kept_input(call: _Call, x: Tensor) -> Tensor | QuantizedTensor:
    """What wgrad needs of this rank's input (R, K): its transpose (K, R) quantized, or itself."""
    if call.operand is not None and call.operand.col is not None:
        return call.operand.col
    if call.shards.sequence_parallel and not call.gathers_codes("wgrad", x.shape[0]):
        return x
    if call.quantizer("wgrad", "input") is None:
        return x
    return call.quantize("wgrad", "input", x.t(), x.shape[0])


def _quantize_gathered(call: _Call, gemm: str, x: Tensor) -> Tensor | QuantizedTensor:
    """Gather x (R, K) in its own precision, then quantize the whole as an unsplit input."""
    total = gather_rows(x, call.shards.group)
    shards = replace(call.shards, sequence_parallel=False, roles=call.shards.roles - {"input"})
    whole = replace(call, shards=shards)
    operand = total if gemm == "fprop" else total.t()
    return whole.quantize(gemm, "input", operand, total.shape[0])


def _dgrad(
    call: _Call, grad: Tensor, weight: Tensor, fprop_weight: QuantizedTensor | None
) -> Tensor:
    """dX (M, K) of this rank's features, in grad's dtype."""
    if fprop_weight is not None:
        dgrad_weight = fprop_weight.transpose()
    else:
        dgrad_weight = call.quantize("dgrad", "weight", weight.t(), 0)
    lhs = call.quantize("dgrad", "grad", grad, grad.shape[0])
    return call.gemm("dgrad", lhs, dgrad_weight).to(grad.dtype)


def _wgrad(call: _Call, grad: Tensor, kept: Tensor | QuantizedTensor) -> Tensor:
    """dW (N, K)."""
    if isinstance(kept, QuantizedTensor):
        rhs = gather_columns(kept, call.shards.group) if call.shards.sequence_parallel else kept
    elif call.shards.sequence_parallel:
        rhs = _quantize_gathered(call, "wgrad", kept)
    else:
        rhs = call.quantize("wgrad", "input", kept.t(), kept.shape[0])
    lhs = call.quantize("wgrad", "grad", grad.t(), grad.shape[0])
    return call.gemm("wgrad", lhs, rhs)


def _reduce(shards: Shards, dgrad: Tensor) -> tuple[Tensor, dist.Work | None]:
    """Start summing dX over the group, to run while wgrad computes."""
    if shards.sequence_parallel:
        local = dgrad.new_empty(
            (dgrad.shape[0] // dist.get_world_size(shards.group), dgrad.shape[1])
        )
        return local, dist.reduce_scatter_tensor(local, dgrad, group=shards.group, async_op=True)
    if shards.allreduce_dgrad:
        return dgrad, dist.all_reduce(dgrad, group=shards.group, async_op=True)
    return dgrad, None


def _deliver_wgrad(call: _Call, weight: Tensor, wgrad: Tensor) -> Tensor:
    """Add dW to ``weight.main_grad`` and return a stand-in, or return dW for autograd to add."""
    if not (call.accumulate_main_grad and hasattr(weight, "main_grad")):
        return wgrad.to(weight.dtype)
    weight.main_grad.add_(wgrad)
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def _keep(ctx, *operands: Tensor | QuantizedTensor | None) -> None:
    """Save operands for backward; a quantized one as its three tensors and what describes it."""
    tensors, described = [], []
    for operand in operands:
        if isinstance(operand, QuantizedTensor):
            tensors += [operand.codes, operand.scales, operand.tensor_scale]
            described.append((operand.format, operand.shape))
        else:
            tensors.append(operand)
            described.append(None)
    ctx.save_for_backward(*tensors)
    ctx.described = described


def _kept(ctx) -> list[Tensor | QuantizedTensor | None]:
    """What :func:`_keep` saved."""
    tensors = iter(ctx.saved_tensors)
    return [
        next(tensors)
        if description is None
        else QuantizedTensor(next(tensors), next(tensors), next(tensors), *description)
        for description in ctx.described
    ]


def lowbit_linear(
    x: Tensor | Operand,
    weight: Tensor,
    precision: LinearPrecision,
    *,
    bias: Tensor | None = None,
    key: int | None = None,
    shards: Shards = UNSHARDED,
    engine: Engine | None = None,
    accumulate_main_grad: bool = False,
    amax_history: AmaxHistory | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` with each of the three GEMMs in the given precision.

    Args:
        x: (..., K), FP32 or BF16; or an Operand that is already quantized for fprop (``row``)
            and wgrad (``col``), gradients then going to its ``source``.
        weight: (N, K).
        precision: how each operand of each GEMM is quantized.
        bias: (N,), added in high precision.
        key: 64-bit key of stochastic rounding and of fresh signs, used in forward and backward of
            this call; None takes one from torch's default CPU generator.
        shards: how tensor parallelism splits the layer. Under sequence parallelism x's first
            axis is this rank's part and the result's is the whole.
        engine: where the arithmetic runs; None chooses by x's device.
        accumulate_main_grad: add dW to ``weight.main_grad`` (where the weight has one), as
            megatron-core's DistributedDataParallel expects of fused accumulation.
        amax_history: the state of delayed scaling, a row for each of ``recipes.OPERANDS``; read,
            and written where autograd records. Whoever owns it ends its steps.

    Returns:
        (..., N) in x's dtype.
    """
    operand = x if isinstance(x, Operand) else None
    source = x.source if operand is not None else x
    if key is None:
        # Drawing a key that nothing uses would shift the random numbers of dropout.
        key = int(torch.randint(2**63 - 1, ())) if precision.stochastic else 0
    call = _Call(
        precision=precision,
        engine=engine or select_engine(source.device),
        shards=shards,
        key=key,
        accumulate_main_grad=accumulate_main_grad,
        training=torch.is_grad_enabled(),
        keep_input=torch.is_grad_enabled() and weight.requires_grad,
        operand=operand,
        amax_history=amax_history,
    )
    return _LowbitLinear.apply(source, weight, bias, call)
