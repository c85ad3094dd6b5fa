"""The norm of Transformer Engine's LayerNormLinear, by its kernels, without the linear layer.

Source: transformer_engine/pytorch/module/layernorm_linear.py of version 2.20.
"""

from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformer_engine.pytorch.constants import TE_DType


def normalized(x: Tensor, module: torch.nn.Module) -> Tensor:
    """Normalize x (..., K) as a LayerNormLinear module does before its product, in x's dtype."""
    # Here, for autograd records nothing inside of its functions.
    margin = module.fwd_ln_sm_margin if torch.is_grad_enabled() else module.inf_ln_sm_margin
    parameters = module.layer_norm_weight, module.layer_norm_bias
    y: Tensor = _Norm.apply(x, *parameters, margin, module)  # type: ignore[no-untyped-call]
    return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        margin: int,
        module: torch.nn.Module,
    ) -> Tensor:
        forward = tex.rmsnorm_fwd if bias is None else tex.layernorm_fwd
        parameters = (weight,) if bias is None else (weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        y, mean, inverse = forward(
            rows, *parameters, module.eps, None, None, TE_DType[x.dtype], margin,
            module.zero_centered_gamma,
        )  # fmt: skip
        ctx.save_for_backward(rows, weight, mean, inverse)
        ctx.options = module.bwd_ln_sm_margin, module.zero_centered_gamma
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, mean, inverse = ctx.saved_tensors
        grads = grad.reshape(rows.shape)
        if mean is None:
            dx, dweight = tex.rmsnorm_bwd(grads, rows, inverse, weight, *ctx.options)
            dbias = None
        else:
            dx, dweight, dbias = tex.layernorm_bwd(grads, rows, mean, inverse, weight, *ctx.options)
        return dx.view(grad.shape), dweight, dbias, None, None
