"""Mean-residual splitting: a matrix as the mean of its rows and a quantized residual.

Source: "Averis" (arXiv 2603.10444). Activations and their gradients have a mean over tokens that is
large compared with what varies, and takes the range of a block's few numbers. With M tokens, R
(M, K) is quantized in place of X, and the mean stays in high precision:

    mean  = fp32(sum over tokens of X in FP64 / M)
    R     = X - mean                  FP32; amaxes are R's
    X_hat = mean + Q(R)               FP32

(The authors' code sums in FP32, in whichever order torch takes.) The mean is of all tokens of
a call of the layer: of a microbatch, on its rank.
"""

import torch
from torch import Tensor


def split_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x (M, K), FP32, into the mean of its rows, FP32 (K,), and the residual, FP32 (M, K).

    The mean of no rows is 0.
    """
    mean = (x.sum(dim=0, dtype=torch.float64) / max(len(x), 1)).to(torch.float32)
    return mean, x - mean
