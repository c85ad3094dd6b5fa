"""Delayed scaling around the cast: the tensor's own amax is taken in it, not in a pass before it.

Two kernels surround the cast and end at once in an ordinary step. One before it takes the amax as
long as too few steps are known. The other, behind it, records the amax; where that is not finite,
it replaces what the cast has made by NaN, as a scale from that amax would have.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.elements import abs_bits
from megatron_lowbit.kernels.launcher import Launcher, cdiv
from megatron_lowbit.kernels.tiles import load_tile
from megatron_lowbit.numerics import DelayedAmax, QuantizedTensor

_INFINITY = tl.constexpr(0x7F800000)
"""FP32 bits: those of NaN are larger."""
_NAN_CODE = tl.constexpr(0x7F)
"""NaN in E4M3 and E5M2."""
_TILE = (64, 256)
_SPAN = 32768


def own_amax(x: Tensor, earlier: Sequence[Tensor | None]) -> Tensor:
    """Return bits (int32 scalar) of the amax of x (R, C), zero where all ``earlier`` are known.

    Args:
        x: FP32 or BF16, any strides.
        earlier: FP32 scalars, negative where too few steps are known; one may be None.
    """
    current_amax = torch.zeros((), dtype=torch.int32, device=x.device)
    needed = [amax for amax in earlier if amax is not None]
    ends = needed[0], needed[-1]
    launch = _own_amax_launcher(x.shape, x.stride(), x.dtype, x.device)
    launch((x, *x.stride(), *x.shape, current_amax, *ends))
    return current_amax


@lru_cache(maxsize=4096)
def _own_amax_launcher(
    shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Launcher:
    programs = cdiv(shape[0], _TILE[0]) * cdiv(shape[1], _TILE[1])
    return Launcher(_own_amax_kernel, programs, _TILE, varying=(0, 6, 7), num_warps=8)


def record_amax(
    current_amax: Tensor,
    amaxes: Sequence[DelayedAmax | None],
    outputs: Sequence[QuantizedTensor | None],
) -> None:
    """Record an amax, given as FP32 bits; replace outputs by NaN if it is not finite."""
    steps = [None if amax is None else amax.step for amax in amaxes]
    codes = [None if one is None else one.codes.view(torch.uint8) for one in outputs]
    scales = [None if one is None else one.tensor_scale for one in outputs]
    count = next(one.numel() for one in codes if one is not None)
    arguments = current_amax, steps[0], codes[0], scales[0], steps[1], codes[1], scales[1], count
    _record_launcher(count, current_amax.device)(arguments)


@lru_cache(maxsize=4096)
def _record_launcher(count: int, device: torch.device) -> Launcher:
    return Launcher(_record_kernel, cdiv(count, _SPAN), (_SPAN,), range(1, 7), num_warps=8)


@triton.jit
def _own_amax_kernel(
    x, stride_r, stride_c, R, C, current_amax, first, second, TM: tl.constexpr, TN: tl.constexpr
):
    if (tl.load(first) < 0) | (tl.load(second) < 0):
        tiles = tl.cdiv(C, TN)
        row0 = (tl.program_id(0) // tiles) * TM
        col0 = (tl.program_id(0) % tiles) * TN
        atomic_amax(current_amax, load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, False))


@triton.jit
def atomic_amax(current_amax, tile):
    """Raise an int32 scalar to the FP32 bits of the largest magnitude of a tile."""
    tl.atomic_max(current_amax, tl.max(tl.max(abs_bits(tile), 1), 0))


@triton.jit
def delayed_amax(earlier, current_amax):
    """Return the amax of earlier steps where it is known, else the tensor's own, complete then."""
    amax = tl.load(earlier)
    return tl.where(amax < 0, tl.load(current_amax).to(tl.float32, bitcast=True), amax)


@triton.jit
def _record_kernel(
    current_amax, r_step, r_codes, r_scale, c_step, c_codes, c_scale, count, SPAN: tl.constexpr
):
    bits = tl.load(current_amax)
    if bits < _INFINITY:
        if tl.program_id(0) == 0:
            amax = bits.to(tl.float32, bitcast=True)
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
