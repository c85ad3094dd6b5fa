"""The reference GEMM: dequantize, multiply in FP32."""

import torch
from torch import Tensor

from megatron_lowbit.numerics.quantizer import QuantizedTensor


def gemm(lhs: Tensor | QuantizedTensor, rhs: Tensor | QuantizedTensor) -> Tensor:
    """``lhs @ rhs.T``: both operands have the contraction axis last, as quantized blocks do.

    Args:
        lhs: (M, K), quantized or not.
        rhs: (N, K), quantized or not.

    Returns:
        (M, N). Operands that are both high precision multiply in their own dtype; a quantized
        operand is dequantized to FP32, which makes the product FP32.
    """
    if isinstance(lhs, Tensor) and isinstance(rhs, Tensor):
        return torch.matmul(lhs, rhs.t())
    left, right = (
        (operand.dequantize() if isinstance(operand, QuantizedTensor) else operand).float()
        for operand in (lhs, rhs)
    )
    return torch.matmul(left, right.t())
