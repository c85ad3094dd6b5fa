"""Linear layers of a mixture of experts, each applied to the tokens that are routed to it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.layers.context import LinearContext
from megatron_lowbit.layers.linear import lowbit_linear


def lowbit_grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    contexts: Sequence[LinearContext | None],
    tokens_per_expert: Sequence[int],
    biases: Sequence[Tensor | None],
) -> Tensor:
    """Compute ``x_e @ weight_e.T + bias_e`` for the tokens of each expert e.

    Args:
        x: (T, K), FP32 or BF16, one expert's tokens after another's.
        weights: (N, K) of each expert.
        contexts: precision and state of each expert's call; None for high precision.
        tokens_per_expert: their numbers, of sum T. An expert without tokens has nothing to
            quantize, and no amax to record.
        biases: (N,) of each expert, or None.

    Returns:
        (T, N) in x's dtype.
    """
    products = []
    parts = x.split(list(tokens_per_expert))
    for part, weight, context, bias in zip(parts, weights, contexts, biases, strict=True):
        if context is None or not len(part):
            products.append(F.linear(part, weight, bias))
        else:
            products.append(lowbit_linear(part, weight, context, bias))
    return torch.cat(products)
