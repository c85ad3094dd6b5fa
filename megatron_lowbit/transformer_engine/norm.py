"""The norm of Transformer Engine's LayerNormLinear without the linear layer.

RMSNorm's forward pass is the engine's kernel where it has one, which takes the amax of what it
writes; all else runs Transformer Engine's kernels.

Source: transformer_engine/pytorch/module/layernorm_linear.py and ops/fused/backward_add_rmsnorm.py
of version 2.20.
"""

from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformer_engine.pytorch.constants import TE_DType

from megatron_lowbit.kernels.engine import Engine


def normalized(
    x: Tensor, module: torch.nn.Module, engine: Engine
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normalize x (..., K) as a LayerNormLinear module does before its product.

    Returns:
        The rows, in x's dtype; x for a residual connection, whose gradient the norm's backward pass
        adds to its own; and the amax of the rows, FP32 (), where the engine's kernel takes it.
    """
    # Here, for autograd records nothing inside of its functions.
    margin = module.fwd_ln_sm_margin if torch.is_grad_enabled() else module.inf_ln_sm_margin
    parameters = module.layer_norm_weight, module.layer_norm_bias
    outputs: tuple[Tensor, Tensor, Tensor | None] = _Norm.apply(  # type: ignore[no-untyped-call]
        x, *parameters, margin, module, engine
    )
    return outputs


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        margin: int,
        module: torch.nn.Module,
        engine: Engine,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, ours = x.reshape(-1, x.shape[-1]), None
        if bias is None and not module.zero_centered_gamma:
            ours = engine.rms_norm(rows, weight, module.eps)
        if ours is not None:
            y, inverse, amax = ours
            mean = None
            ctx.mark_non_differentiable(amax)
        else:
            forward = tex.rmsnorm_fwd if bias is None else tex.layernorm_fwd
            parameters = (weight,) if bias is None else (weight, bias)
            y, mean, inverse = forward(
                rows, *parameters, module.eps, None, None, TE_DType[x.dtype], margin,
                module.zero_centered_gamma,
            )  # fmt: skip
            amax = None
        ctx.save_for_backward(rows, weight, mean, inverse)
        ctx.options = module.bwd_ln_sm_margin, module.zero_centered_gamma
        ctx.set_materialize_grads(False)
        return y.view(x.shape), x, amax

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, residual: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return residual, None, None, None, None, None
        rows, weight, mean, inverse = ctx.saved_tensors
        grads, dbias = grad.reshape(rows.shape), None
        if mean is not None:
            dx, dweight, dbias = tex.layernorm_bwd(grads, rows, mean, inverse, weight, *ctx.options)
            dx = dx if residual is None else dx + residual.reshape(rows.shape)
        elif residual is None:
            dx, dweight = tex.rmsnorm_bwd(grads, rows, inverse, weight, *ctx.options)
        else:
            added = residual.reshape(rows.shape).contiguous()
            dx, dweight = tex.rmsnorm_bwd_add(grads, rows, added, inverse, weight, *ctx.options)
        return dx.view(grad.shape), dweight, dbias, None, None, None
