"""A linear layer's tensors, its precision, and its results under the reference engine."""

import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.numerics import AmaxHistory
from megatron_lowbit.recipes import OPERANDS, LinearPrecision, load_precision, load_recipe

ENGINE = ReferenceEngine("tests")


def precision_of(name: str, *overrides: str) -> LinearPrecision:
    """Return the one precision of a recipe that quantizes."""
    return load_precision(load_recipe(name, overrides))


def history(length: int = 16) -> AmaxHistory:
    """Return a layer's amax history without a step."""
    return AmaxHistory(len(OPERANDS), length, torch.device("cpu"))


def leaves(m: int, n: int, k: int, seed: int = 5) -> tuple[torch.Tensor, ...]:
    """Return x (m, k) and weight (n, k) as leaves, and a gradient of y (m, n)."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, dy = (torch.randn(s, generator=generator) for s in ((m, k), (n, k), (m, n)))
    return x.requires_grad_(), weight.requires_grad_(), dy


def run(x, weight, dy, precision, **options) -> tuple[torch.Tensor, ...]:
    """Return y, dX and dW; ``options`` are fields of LinearContext."""
    context = LinearContext(precision, **{"engine": ENGINE, "key": 3} | options)
    y = lowbit_linear(x, weight, context)
    return (y.detach(), *torch.autograd.grad(y, [x, weight], dy))
