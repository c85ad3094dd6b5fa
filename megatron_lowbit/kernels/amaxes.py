"""Amaxes of a matrix and of its transpose, from one pass over it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import amax_kernel
from megatron_lowbit.kernels.forms import Form
from megatron_lowbit.kernels.launcher import Launcher, tile_launcher
from megatron_lowbit.kernels.row_amax import row_amax_kernel
from megatron_lowbit.kernels.sides import signs_of, transform_of
from megatron_lowbit.numerics import Amaxes, DelayedAmax, Hadamard, Request, ScaleAmaxes
from megatron_lowbit.numerics import tensor_amaxes as reference

LARGEST_TRANSFORM = 128
"""Points of the largest transform that a tile holds in both directions."""


def scale_amaxes(
    x: Tensor,
    row: Request | None,
    col: Request | None,
    amaxes: ScaleAmaxes,
    forms: tuple[Form, Form],
) -> Amaxes:
    """Return the amaxes of tensors and of rows that scales and folding are made from.

    ``amaxes`` are those that are known; those of earlier steps are resolved by a pass over x.
    """
    if any(isinstance(amax, DelayedAmax) for amax in amaxes):
        amaxes = _resolved(x, row, col, amaxes)
    missing = [
        measured(request, form) if request is not None and amax is None else None
        for request, amax, form in zip((row, col), amaxes, forms, strict=True)
    ]
    own, rows = _tensor_amaxes(x, *missing), _row_amaxes(x, row, col)
    by_row, by_col = (
        next((amax for amax in found if amax is not None), None)
        for found in zip(amaxes, own, rows, strict=True)
    )
    return by_row, by_col


def _resolved(x: Tensor, row: Request | None, col: Request | None, amaxes: ScaleAmaxes) -> Amaxes:
    by_row, by_col = (
        amax.resolve(own) if isinstance(amax, DelayedAmax) else amax
        for amax, own in zip(amaxes, _tensor_amaxes(x, row, col), strict=True)
    )
    return by_row, by_col


def measured(request: Request, form: Form) -> Request | None:
    """Return the request whose tensor amax is needed: for folding, before a transform."""
    if request.quantizer.format.tensor_scaled:
        return request
    if form is not Form.FOLDED:
        return None
    return request if request.hadamard is None else replace(request, hadamard=None)


def tensor_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Compute what :func:`megatron_lowbit.numerics.tensor_amaxes` does, in one pass over x."""
    if not x.numel():
        return reference(x, row, col)
    return _tensor_amaxes(
        x, *(r if r and r.quantizer.format.tensor_scaled else None for r in (row, col))
    )


def _tensor_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Compute the amaxes of both sides, whatever their formats; None for None."""
    if row is None and col is None:
        return None, None
    plain = all(r is None or r.hadamard is None for r in (row, col))
    if row and col and (col is row or plain):
        amax, _ = _tensor_amaxes(x, row, None)
        return amax, amax
    zeros = torch.zeros(2 if row and col else 1, dtype=torch.int32, device=x.device).unbind()
    by_row, by_col = _maxed(amax_kernel, x, (row, col), (zeros[0], zeros[-1]), 4, (None,), (0,))
    return by_row, by_col


def _row_amaxes(x: Tensor, row: Request | None, col: Request | None) -> list[Tensor | None]:
    """Return the amaxes of each side's rows, FP32 (R,); None for a format without a scale a row.

    A row of the transpose is a column of x: all of its tokens, where wgrad contracts them.
    """
    sides = [r if r and r.quantizer.format.row_scaled else None for r in (row, col)]
    if not any(sides):
        return [None, None]
    zeros = torch.zeros(sum(x.shape), dtype=torch.int32, device=x.device).split(list(x.shape))
    return _maxed(row_amax_kernel, x, sides, zeros, 8)


def _maxed(
    kernel: Any,
    x: Tensor,
    sides: Sequence[Request | None],
    zeros: Sequence[Tensor],
    warps: int,
    sections: tuple[Tensor | None, ...] = (),
    counts: tuple[int, ...] = (),
) -> list[Tensor | None]:
    """Compute the amaxes of both sides into zeroed int32; return FP32, None for None.

    ``sections`` and ``counts``: arguments of a kernel that takes a table of matrices.
    """
    found = [bits if r else None for bits, r in zip(zeros, sides, strict=True)]
    signs = [signs_of(r.hadamard, r.sign_key) if r else 0 for r in sides]
    hadamards = [r.hadamard if r else None for r in sides]
    launch = _launcher(kernel, x.shape, x.stride(), x.dtype, x.device, *hadamards, warps, *counts)
    launch(
        (x, *x.stride(), *x.shape, *sections, found[0], signs[0], found[1], signs[1]),
        (x, found[0], signs[0], found[1], signs[1]),
    )
    return [None if bits is None else bits.view(torch.float32) for bits in found]


def amax_tile(row: Hadamard | None, col: Hadamard | None) -> tuple[int, int]:
    """Return rows and columns of a tile that holds both sides' transforms."""
    across, down = (1 if one is None else one.size for one in (row, col))
    least = (64, 128) if max(across, down) <= LARGEST_TRANSFORM else (32, 32)
    return max(least[0], down), max(least[1], across)


@lru_cache(maxsize=4096)
def _launcher(
    kernel: Any,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    row: Hadamard | None,
    col: Hadamard | None,
    warps: int,
    *counts: int,
) -> Launcher:
    """Return a launcher for matrices of one kind."""
    sides = transform_of(row), transform_of(col)
    return tile_launcher(kernel, shape, amax_tile(row, col), *sides, *counts, num_warps=warps)
