"""Four-over-six: each NVFP4 block takes the scale that puts its largest magnitude at 6 or at 4.

Source: "Four Over Six" (arXiv 2512.02010), in the operation order of Transformer Engine's reference
quantizer. With M the largest block scale, the candidates of a block are, all in FP32,

    base  = (amax_block / 6) * S_enc              S_enc = min(6 * M / amax_tensor, FLT_MAX)
    s_6   = e4m3(min(base, 448));  s_4 = e4m3(min(base * 1.5, 448))
    enc_k = min(1 / (s_k * (1 / S_enc)), FLT_MAX);  code_k = e2m1(clamp(x * enc_k, -6, 6))
    d_k   = ((code_k * s_k) * amax_tensor) / (6 * M) - x

and the second is taken where its error is less, not where it is the same. The error is the sum of
d**2 (``mse``), the sum of |d| (``mae``) or the largest |d| (``abs_max``). Sums run over the 16
elements of a row in order; sums of a 16x16 block's rows i and i + 8 are then added, i and i + 4,
i and i + 2, and the last two. (Sums of the transposed block have another order and may decide a
near tie otherwise. A weight's transpose takes the weight's codes.) Stochastic rounding takes random
numbers of its own for each candidate: the choice then depends on them, which biases the result.
"""

from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor

from megatron_lowbit.numerics.formats import E4M3, encode

Selection = Literal["none", "mse", "mae", "abs_max"]


def better_of(
    codes: Tensor, scales: Tensor, difference: Tensor, selection: Selection
) -> tuple[Tensor, Tensor]:
    """Return codes and E4M3 scales of the second candidate where its error is less, or the first.

    ``codes`` and FP32 ``scales`` have both candidates, as has the ``difference`` of their values
    from the blocks, (2, R/rows, rows, K/16, 16).
    """
    if selection == "abs_max":
        errors = difference.abs().amax(dim=(2, 4), keepdim=True)
    else:
        terms = difference * difference if selection == "mse" else difference.abs()
        rows = list(reduce(add, terms.unbind(-1)).unbind(2))
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [low + high for low, high in zip(rows[:half], rows[half:], strict=True)]
        errors = rows[0].unsqueeze(2).unsqueeze(-1)
    less = errors[1] < errors[0]
    taken = torch.where(less, scales[1], scales[0])
    return torch.where(less, codes[1], codes[0]), encode(taken, E4M3)
