"""Kernels that an amax in device memory decides about: in an ordinary step they end at once.

Delayed scaling takes the tensor's own amax in the cast, not in a pass before it. As long as too few
steps are known, a pass takes it (``amaxes.matrix_amax``). Behind the cast a kernel records it;
where it is not finite, the kernel replaces what the cast has made by NaN, as a scale from that amax
would have. A fallback computes a product in high precision where the product of quantized
operands is not finite.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.launcher import Launcher, cdiv
from megatron_lowbit.numerics import DelayedAmax, QuantizedTensor

_NAN_CODE = tl.constexpr(0x7F)
"""NaN in E4M3 and E5M2."""
_SPAN = 32768
_TILE, _DEPTH = 64, 32


def record_amax(
    current_amax: Tensor,
    amaxes: Sequence[DelayedAmax | None],
    outputs: Sequence[QuantizedTensor | None],
) -> None:
    """Record an amax, an FP32 scalar; replace outputs by NaN if it is not finite."""
    sides = []
    for amax, output in zip(amaxes, outputs, strict=True):
        sides += [None if amax is None else amax.step]
        sides += [None] * 2 if output is None else [output.codes, output.tensor_scale]
    count = next(output.codes.numel() for output in outputs if output is not None)
    _record_launcher(count, current_amax.device)((current_amax, *sides, count))


@lru_cache(maxsize=4096)
def _record_launcher(count: int, device: torch.device) -> Launcher:
    views = {2: torch.uint8, 5: torch.uint8}
    programs = cdiv(count, _SPAN)
    return Launcher(_record_kernel, programs, (_SPAN,), range(1, 7), views, num_warps=8)


@triton.jit
def _record_kernel(
    current_amax, r_step, r_codes, r_scale, c_step, c_codes, c_scale, count, SPAN: tl.constexpr
):
    amax = tl.load(current_amax)
    if amax < float("inf"):
        if tl.program_id(0) == 0:
            if r_step is not None:
                tl.store(r_step, tl.maximum(tl.load(r_step), amax))
            if c_step is not None:
                tl.store(c_step, tl.maximum(tl.load(c_step), amax))
    else:
        if r_codes is not None:
            _fill_with_nan(r_codes, r_scale, count, SPAN)
        if c_codes is not None:
            _fill_with_nan(c_codes, c_scale, count, SPAN)


@triton.jit
def _fill_with_nan(codes, scale, count, SPAN: tl.constexpr):
    tl.store(scale, float("nan"))
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    tl.store(codes + at, tl.full((SPAN,), _NAN_CODE, tl.uint8), mask=at < count)


def recompute(y: Tensor, amax: Tensor, lhs: Tensor, rhs: Tensor, bias: Tensor | None) -> None:
    """Put ``lhs @ rhs.T + bias`` in the place of y where its ``amax`` is not finite.

    Args:
        y: (M, N), contiguous.
        amax: FP32 scalar.
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
def _recompute_kernel(
    y, amax, lhs, lhs_m, lhs_k, rhs, rhs_n, rhs_k, bias, M, N, K: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y again. Programs end at once if y is finite."""
    if not tl.load(amax) < float("inf"):
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
