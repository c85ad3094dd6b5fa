"""Means of rows on a GPU: split off before quantization, added again to products.

With A = A' + a and B = B' + b, where a and b are means, ``A @ B.T`` is ``A' @ B'.T``, a product of
exact BF16 numbers, plus products of a mean with one matrix, in FP32. A mean along the terms of a
product gives a row that all rows have in common; one that is the same for all terms gives an outer
product with the sums of the other operand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.operands import ExactBF16, GpuOperand, exact_values, is_exact
from megatron_lowbit.kernels.tiles import load_raw
from megatron_lowbit.numerics import QuantizedTensor, Request
from megatron_lowbit.numerics import mean_residual as reference

_TILE = 16, 128
"""Rows and columns that a program sums at a time."""
_PARTS = 64
"""Parts of the rows, each summed by programs of its own."""


def split_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x (M, K), FP32 or BF16, as the reference does, from one pass over it for the sums.

    torch sums in FP64 by way of a copy in FP64.
    """
    rows, columns = x.shape
    if not x.numel():
        return reference.split_mean(x.float())
    parts = min(_PARTS, cdiv(rows, _TILE[0]))
    sums = torch.empty((parts, columns), dtype=torch.float64, device=x.device)
    programs = parts * cdiv(columns, _TILE[1])
    _sums_kernel[(programs,)](x, *x.stride(), rows, columns, sums, parts, *_TILE)
    mean = (sums.sum(dim=0) / rows).to(torch.float32)
    return mean, x - mean


@triton.jit
def _sums_kernel(
    x, stride_r, stride_c, R, C, sums, parts, TM: tl.constexpr, TN: tl.constexpr
):  # fmt: skip
    """Sum every so many tiles of x (R, C) to a row of ``sums`` (parts, C), FP64."""
    part, col0 = tl.program_id(0) % parts, tl.program_id(0) // parts * TN
    row0, tile = part * TM, tl.zeros((TM, TN), tl.float64)
    for _ in tl.range(0, tl.cdiv(R - row0, parts * TM)):
        tile += load_raw(x, stride_r, stride_c, row0, col0, R, C, TM, TN, False).to(tl.float64)
        row0 += parts * TM
    column = col0 + tl.arange(0, TN)
    tl.store(sums + part.to(tl.int64) * C + column, tl.sum(tile, 0), mask=column < C)


def splits_mean(*requests: Request | None) -> bool:
    """Return True if one of the requests splits the mean of rows off."""
    return any(request is not None and request.quantizer.splits_mean for request in requests)


def with_means(lhs: GpuOperand, rhs: GpuOperand) -> tuple[GpuOperand, GpuOperand]:
    """Return operands, decoded where the mean of their rows was split off.

    Both are exact in BF16 then, or one becomes FP32 values.
    """
    pair = lhs, rhs
    lacks_mean = [isinstance(q, QuantizedTensor) and q.mean is not None for q in pair]
    if not any(lacks_mean):
        return lhs, rhs
    exact = is_exact(lhs) and is_exact(rhs)
    decode = exact_values if exact else QuantizedTensor.dequantize
    left, right = (decode(q) if lacks else q for q, lacks in zip(pair, lacks_mean, strict=True))
    return left, right


def add_means(product: Tensor, left: ExactBF16, right: ExactBF16) -> Tensor:
    """Add what means contribute to the product (M, N) of two operands' numbers; return it."""
    if left.mean is not None:
        product += _product(left.mean, right)
        if right.mean is not None:
            product += _product_of_means(left.mean, right.mean, left.values.shape[1])
    if right.mean is not None:
        product += _product(right.mean, left).t()
    return product


def _product(mean: Tensor, other: ExactBF16) -> Tensor:
    """Return a mean (1, K) or (M, 1) times the transpose of numbers (N, K): (1, N) or (M, N)."""
    if mean.shape[1] == 1:
        products = mean * other.values.sum(dim=1, dtype=torch.float32)
    else:
        products = mean @ other.values.float().t()
    return products if other.tensor_scale is None else products * other.tensor_scale.t()


def _product_of_means(left: Tensor, right: Tensor, terms: int) -> Tensor:
    """Return the product of two means, of so many terms."""
    if left.shape[1] == right.shape[1] == 1:
        return left * right.t() * terms
    return left.expand(-1, terms) @ right.expand(-1, terms).t()
