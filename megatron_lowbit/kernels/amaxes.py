"""Amaxes of a matrix and of its transpose, from one pass over it."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import amax_kernel
from megatron_lowbit.kernels.forms import Form
from megatron_lowbit.kernels.launcher import Launcher, tile_launcher
from megatron_lowbit.kernels.row_amax import row_amax_kernel
from megatron_lowbit.kernels.sides import signs_of, transform_of
from megatron_lowbit.numerics import Amaxes, DelayedAmax, Hadamard, Request, ScaleAmaxes
from megatron_lowbit.numerics import tensor_amaxes as reference

_TILE = 8192
"""Elements of a tile."""
LARGEST_TRANSFORM = 128
"""Points of the largest transform that a tile holds in both directions."""


class Measured(NamedTuple):
    """A side whose amax is taken: after which transform, and the key of fresh signs."""

    hadamard: Hadamard | None
    sign_key: int | Tensor


_AS_IT_IS = Measured(None, 0)


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
    by_row, by_col = amaxes
    if isinstance(by_row, DelayedAmax) or isinstance(by_col, DelayedAmax):
        own = tensor_amaxes(x, row, col)
        by_row, by_col = (
            amax.resolve(one) if isinstance(amax, DelayedAmax) else amax
            for amax, one in zip(amaxes, own, strict=True)
        )
    first = None if row is None or by_row is not None else measured(row, forms[0])
    second = None if col is None or by_col is not None else measured(col, forms[1])
    own = _tensor_amaxes(x, first, first if row is col and first else second)
    by_row, by_col = _known_or((by_row, by_col), own)
    if any(side is not None and side.quantizer.format.row_scaled for side in (row, col)):
        by_row, by_col = _known_or((by_row, by_col), _row_amaxes(x, row, col))
    return by_row, by_col


def _known_or(known: Amaxes, found: Amaxes) -> Amaxes:
    return found[0] if known[0] is None else known[0], found[1] if known[1] is None else known[1]


def measured(request: Request, form: Form) -> Measured | None:
    """Return after which transform a tensor's amax is needed: for folding, before any."""
    if request.quantizer.format.tensor_scaled:
        return Measured(request.hadamard, request.sign_key)
    return _AS_IT_IS if form is Form.FOLDED else None


def tensor_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Compute what :func:`megatron_lowbit.numerics.tensor_amaxes` does, in one pass over x."""
    if not x.numel():
        return reference(x, row, col)
    first = None if row is None else measured(row, Form.CODES)
    second = None if col is None else measured(col, Form.CODES)
    return _tensor_amaxes(x, first, first if row is col else second)


def _tensor_amaxes(x: Tensor, row: Measured | None, col: Measured | None) -> Amaxes:
    if row is None and col is None:
        return None, None
    if row is not None and (col is row or col == row == _AS_IT_IS):
        amax, _ = _tensor_amaxes(x, row, None)
        return amax, amax
    zeros = [None if side is None else _zero(x.device) for side in (row, col)]
    return _maxed(amax_kernel, x, row, col, zeros, 4, (None,), (0,))


def _zero(device: torch.device) -> Tensor:
    """Return int32 zero (), aligned to 16 bytes, in memory that nothing else has or had.

    One fill makes many of them: it takes as long on the CPU as the kernel that needs one. A CUDA
    graph fills its own each time that it runs.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros((), dtype=torch.int32, device=device)
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    zero = next(_ZEROS.get(key, _NONE), None)
    if zero is None:
        batch = torch.zeros((_BATCH, 4), dtype=torch.int32, device=device)
        _ZEROS[key] = iter(batch[:, 0].unbind())
        zero = next(_ZEROS[key])
    return zero


_BATCH = 1024
_NONE: Iterator[Tensor] = iter(())
_ZEROS: dict[tuple[torch.device, int], Iterator[Tensor]] = {}
"""Zeros that are left of the last fill, by device and stream."""


def _row_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Return the amaxes of each side's rows, FP32 (R,); None for a format without a scale a row.

    A row of the transpose is a column of x: all of its tokens, where wgrad contracts them.
    """
    sides = [
        Measured(side.hadamard, side.sign_key)
        if side is not None and side.quantizer.format.row_scaled
        else None
        for side in (row, col)
    ]
    whole = torch.zeros(sum(x.shape), dtype=torch.int32, device=x.device).split(list(x.shape))
    zeros = [None if side is None else part for side, part in zip(sides, whole, strict=True)]
    return _maxed(row_amax_kernel, x, *sides, zeros, 8)


def _maxed(
    kernel: Any,
    x: Tensor,
    row: Measured | None,
    col: Measured | None,
    zeros: Sequence[Tensor | None],
    warps: int,
    sections: tuple[Tensor | None, ...] = (),
    counts: tuple[int, ...] = (),
) -> Amaxes:
    """Compute the amaxes of both sides into zeroed int32, None for no side; return FP32.

    ``sections`` and ``counts``: arguments of a kernel that takes a table of matrices.
    """
    row_hadamard, row_key = row or _AS_IT_IS
    col_hadamard, col_key = col or _AS_IT_IS
    by_row, by_col = zeros
    launch = _launcher(
        kernel, x.shape, x.stride(), x.dtype, x.device, row_hadamard, col_hadamard, warps, *counts
    )
    launch(
        (
            x, *x.stride(), *x.shape, *sections,
            by_row, signs_of(row_hadamard, row_key), by_col, signs_of(col_hadamard, col_key),
        )
    )  # fmt: skip
    return (
        None if by_row is None else by_row.view(torch.float32),
        None if by_col is None else by_col.view(torch.float32),
    )


def amax_tile(row: Hadamard | None, col: Hadamard | None, height: int = 64) -> tuple[int, int]:
    """Return rows and columns of a tile that holds both sides' transforms.

    ``height`` is that of a tile without long transforms.
    """
    across, down = (1 if one is None else one.size for one in (row, col))
    small = max(across, down) <= LARGEST_TRANSFORM
    least = (height, _TILE // height) if small else (32, 32)
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
    found = 5 + len(counts)
    varying = (0, *range(found, found + 4))
    return tile_launcher(
        kernel, shape, amax_tile(row, col), *sides, *counts, varying=varying, num_warps=warps
    )
