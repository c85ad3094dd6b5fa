"""The reference GEMM: dequantize, multiply in FP32."""

import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.numerics.quantizer import QuantizedTensor


def gemm(
    lhs: Tensor | QuantizedTensor, rhs: Tensor | QuantizedTensor, bias: Tensor | None = None
) -> Tensor:
    """``lhs @ rhs.T + bias``: both operands have the contraction axis last, as quantized blocks do.

    Args:
        lhs: (M, K), quantized or not.
        rhs: (N, K), quantized or not.
        bias: (N,), added before the product is rounded to a narrower dtype.

    Returns:
        (M, N). Operands that are both high precision multiply in their own dtype; a quantized
        operand is dequantized to FP32, which makes the product FP32.
    """
    if isinstance(lhs, Tensor) and isinstance(rhs, Tensor):
        return F.linear(lhs, rhs, bias)
    left, right = (
        (operand.dequantize() if isinstance(operand, QuantizedTensor) else operand).float()
        for operand in (lhs, rhs)
    )
    return F.linear(left, right, None if bias is None else bias.float())
