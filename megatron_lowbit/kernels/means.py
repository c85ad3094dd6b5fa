"""Means of rows on a GPU: split off before quantization, added again to products.

With A = A' + a and B = B' + b, where a and b are means, ``A @ B.T`` is ``A' @ B'.T``, a product of
exact BF16 numbers, plus products of a mean with one matrix, in FP32. A mean along the terms of a
product gives a row that all rows have in common; one that is the same for all terms gives an outer
product with the sums of the other operand.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_lowbit.kernels.operands import Values
from megatron_lowbit.numerics import Request


def residual_request(request: Request) -> Request:
    """Return the request for a residual, of one that splits the mean off."""
    return replace(request, quantizer=replace(request.quantizer, splits_mean=False))


def without_mean(operand: Values) -> Values:
    """Return the numbers alone."""
    return Values(operand.values, operand.tensor_scale)


def add_means(product: Tensor, left: Values, right: Values) -> Tensor:
    """Add what means contribute to the product (M, N) of two operands' numbers; return it."""
    if left.mean is not None:
        product += _product(left.mean, right)
        if right.mean is not None:
            product += _product_of_means(left.mean, right.mean, left.values.shape[1])
    if right.mean is not None:
        product += _product(right.mean, left).t()
    return product


def _product(mean: Tensor, other: Values) -> Tensor:
    """Return a mean (1, K) or (M, 1) times the transpose of numbers (N, K): (1, N) or (M, N)."""
    if mean.shape[1] == 1:
        products = mean * other.values.sum(dim=1, dtype=torch.float32)
    else:
        products = mean @ other.values.float().t()
    return products if other.tensor_scale is None else products * other.tensor_scale


def _product_of_means(left: Tensor, right: Tensor, terms: int) -> Tensor:
    """Return the product of two means, of so many terms."""
    if left.shape[1] == right.shape[1] == 1:
        return left * right.t() * terms
    return left.expand(-1, terms) @ right.expand(-1, terms).t()
