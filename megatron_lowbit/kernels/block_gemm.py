"""Product of BF16 numbers with an FP32 scale for each 128 of a row, on both sides."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.grouped_kernels import tile_origin
from megatron_lowbit.kernels.launcher import cdiv

_TERMS = tl.constexpr(128)
"""Products to a scale."""
_TILE = (128, 128)
_OPTIONS = {"num_warps": 8, "num_stages": 3}


def multiply_blocks(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply a (M, K) by b (N, K), K a multiple of 128, to ``dtype`` (M, N).

    Scales are FP32 (M, K/128) and (N, K/128). Tensor cores add up 128 products; their sums, times
    both scales, are added in FP32.
    """
    (rows, terms), columns = a.shape, len(b)
    out = a.new_empty((rows, columns), dtype=dtype)
    if out.numel():
        programs = cdiv(rows, _TILE[0]) * cdiv(columns, _TILE[1])
        # Scales of neighbouring rows are read together.
        scales = a_scales.t().contiguous(), b_scales.t().contiguous()
        block_gemm_kernel[(programs,)](a, b, *scales, out, rows, columns, terms, *_TILE, **_OPTIONS)
    return out


@triton.jit
def block_gemm_kernel(
    a, b, a_scales, b_scales, out, rows, columns, terms, TM: tl.constexpr, TN: tl.constexpr
):  # fmt: skip
    """Compute a tile of the product."""
    row0, col0 = tile_origin(tl.program_id(0), rows, columns, TM, TN)
    row, column, term = row0 + tl.arange(0, TM), col0 + tl.arange(0, TN), tl.arange(0, _TERMS)
    left_inside, right_inside = row < rows, column < columns
    a += row.to(tl.int64)[:, None] * terms + term[None, :]
    b += column.to(tl.int64)[:, None] * terms + term[None, :]
    a_scales += row
    b_scales += column
    sums = tl.zeros((TM, TN), dtype=tl.float32)
    for k0 in tl.range(0, terms, _TERMS):
        left = tl.load(a + k0, mask=left_inside[:, None], other=0.0)
        right = tl.load(b + k0, mask=right_inside[:, None], other=0.0)
        left_scale = tl.load(a_scales, mask=left_inside, other=0.0)
        right_scale = tl.load(b_scales, mask=right_inside, other=0.0)
        sums += tl.dot(left, right.T) * left_scale[:, None] * right_scale[None, :]
        a_scales += rows
        b_scales += columns
    inside = left_inside[:, None] & right_inside[None, :]
    out += row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=inside)
