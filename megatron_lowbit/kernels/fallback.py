"""A product in high precision that is computed only where a flag in device memory says so."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.elements import abs_bits

_INFINITY = tl.constexpr(0x7F800000)
"""FP32 bits: those of NaN are larger."""
_ELEMENTS = 8192
_TILE, _DEPTH = 64, 32


def largest_bits(y: Tensor) -> Tensor:
    """Return the FP32 bits (int32 scalar) of the amax of y, contiguous; a NaN is the largest."""
    largest = torch.zeros((), dtype=torch.int32, device=y.device)
    grid = (triton.cdiv(y.numel(), _ELEMENTS),)
    _largest_kernel[grid](y, y.numel(), largest, _ELEMENTS)
    return largest


def recompute(y: Tensor, amax: Tensor, lhs: Tensor, rhs: Tensor, bias: Tensor | None) -> None:
    """Put ``lhs @ rhs.T + bias`` in the place of y where the bits ``amax`` are not finite.

    Args:
        y: (M, N), contiguous.
        amax: of :func:`largest_bits`.
        lhs: (M, K), any strides, in the dtype of ``rhs``; sums are FP32.
        rhs: (N, K), any strides.
        bias: (N,), or None.
    """
    m, n = y.shape
    grid = (triton.cdiv(m, _TILE) * triton.cdiv(n, _TILE),)
    _recompute_kernel[grid](
        y, amax, lhs, *lhs.stride(), rhs, *rhs.stride(), bias, m, n, lhs.shape[1], _TILE, _DEPTH
    )  # fmt: skip


@triton.jit
def _largest_kernel(y, size, largest, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    values = tl.load(y + at, mask=at < size, other=0.0).to(tl.float32)
    tl.atomic_max(largest, tl.max(abs_bits(values), 0))


@triton.jit
def _recompute_kernel(
    y, amax, lhs, lhs_m, lhs_k, rhs, rhs_n, rhs_k, bias, M, N, K: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y again. Programs end at once if y is finite."""
    if tl.load(amax) >= _INFINITY:
        tiles = tl.cdiv(N, TILE)
        rows = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE).to(tl.int64)
        cols = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE).to(tl.int64)
        total = tl.zeros((TILE, TILE), tl.float32)
        for start in range(0, K, DEPTH):
            k = start + tl.arange(0, DEPTH).to(tl.int64)
            left = tl.load(
                lhs + rows[:, None] * lhs_m + k[None, :] * lhs_k,
                mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0,
            )  # fmt: skip
            right = tl.load(
                rhs + cols[None, :] * rhs_n + k[:, None] * rhs_k,
                mask=(cols[None, :] < N) & (k[:, None] < K), other=0.0,
            )  # fmt: skip
            total = tl.dot(left, right, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        at = y + rows[:, None] * N + cols[None, :]
        tl.store(at, total.to(y.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))
