"""Hot channels of a recipe: the largest quantization errors of a product, made good.

Source: the hot-channel patch of CHON ("Dissecting Outlier Dynamics in LLM NVFP4 Pretraining", arXiv
2602.02047), its single-kernel form. With X and W the operands in high precision, X' and W' their
quantized values, dX = X - X' and dW = W - W',

    score_j = mean |dX_:j| + mean |dW_:j|              of channel j, over tokens and outputs
    Y       = X' . W'^T + [X'_I, dX_I] . [dW_I, W'_I]^T

with the channels I of the largest scores, in which only the error dX_I . dW_I^T stays. Channels are
chosen in each call; the paper tracks them over steps.
"""

import torch
from torch import Tensor

from megatron_lowbit.layers.fallback import WithSource


def add_hot_channels(y: Tensor, lhs: WithSource, rhs: WithSource, share: float) -> Tensor:
    """Return y (M, N), the product of quantized operands, with its hot channels made good.

    Args:
        y: the product, in its dtype, with a bias if there is one.
        lhs, rhs: operands (M, K) and (N, K) with their sources.
        share: part of the K channels that are hot; rounded, and one at least.

    The second product is in the sources' dtype, BF16 or FP32, with sums in FP32.
    """
    pair = []
    for side in (lhs, rhs):
        values = side.operand.dequantize()
        pair.append((values, side.source.float() - values))
    (x, dx), (w, dw) = pair
    if not y.numel() or not x.shape[1]:
        return y
    score = dx.abs().mean(dim=0) + dw.abs().mean(dim=0)
    hot = score.topk(max(1, round(share * len(score)))).indices
    dtype = lhs.source.dtype
    left = torch.cat([x[:, hot], dx[:, hot]], dim=1).to(dtype)
    right = torch.cat([dw[:, hot], w[:, hot]], dim=1).to(dtype)
    return torch.addmm(y.to(dtype), left, right.t()).to(y.dtype)
