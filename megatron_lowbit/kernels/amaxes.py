"""Amaxes of a matrix and of its transpose, from one pass over it."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import amax_kernel, row_amax_kernel
from megatron_lowbit.kernels.hadamard import MAX_LANES
from megatron_lowbit.kernels.launcher import Launcher, cdiv, tile_launcher
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sides import draws_signs, signs_of, transform_of
from megatron_lowbit.numerics import Amaxes, DelayedAmax, Hadamard, Request, ScaleAmaxes
from megatron_lowbit.numerics import tensor_amaxes as reference

BITS = {6: torch.int32, 8: torch.int32}
"""Amaxes by their places in the kernel's arguments, and the dtype as which it takes them."""
_TILE, _THREADS = 8192, 128
"""Elements of a tile; threads of a program, each of which takes whole transforms."""


class AmaxSpec(NamedTuple):
    """A side whose amax is taken: after which transform."""

    hadamard: Hadamard | None


NO_TRANSFORM = AmaxSpec(None)


def measured(kind: Request, form: Form) -> AmaxSpec | None:
    """Return after which transform a tensor's amax is needed: for folding, before any."""
    if kind.quantizer.format.tensor_scaled:
        return AmaxSpec(kind.hadamard)
    return NO_TRANSFORM if form is Form.FOLDED else None


class AmaxPass(NamedTuple):
    """A pass over matrices of one kind; ``shared``: the column side has the row side's amax."""

    launch: Launcher
    row: AmaxSpec | None
    col: AmaxSpec | None
    shared: bool

    def __call__(self, x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
        """Take the amaxes of x, after the transforms of a call's requests; FP32 scalars."""
        by_row = None if self.row is None else zeros_of((), x.device)
        by_col = None if self.col is None else zeros_of((), x.device)
        signs = _sign(self.row, row), _sign(self.col, col)
        self.launch((x, *x.stride(), *x.shape, None, by_row, signs[0], by_col, signs[1]))
        return by_row, by_row if self.shared else by_col


@lru_cache(maxsize=4096)
def amax_pass(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    row: AmaxSpec | None,
    col: AmaxSpec | None,
    same: bool,
) -> AmaxPass | None:
    """Return the pass for matrices of one kind; ``same``: both sides are of one request."""
    if row is None and col is None:
        return None
    shared = row is not None and col is not None and (same or row == col == NO_TRANSFORM)
    col = None if shared else col
    tile, *transforms = _tile_and_transforms(row, col)
    drawn = [place for place, one in zip((7, 9), transforms, strict=True) if draws_signs(one)]
    launch = tile_launcher(
        amax_kernel, shape, tile, *transforms, 0, varying=(0, *drawn), views=BITS, num_warps=4
    )
    return AmaxPass(launch, row, col, shared)


def _tile_and_transforms(row: AmaxSpec | None, col: AmaxSpec | None) -> tuple[Any, ...]:
    """Return the tile that both sides' transforms fit, and the transforms as kernels take them."""
    hadamards = [one and one.hadamard for one in (row, col)]
    return amax_tile(*hadamards), *map(transform_of, hadamards)


def _sign(side: AmaxSpec | None, request: Request | None) -> int | Tensor:
    if side is None or request is None or side.hadamard is None:
        return 0
    return signs_of(side.hadamard, request.sign_key)


def tensor_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Compute what :func:`megatron_lowbit.numerics.tensor_amaxes` does, in one pass over x."""
    if not x.numel():
        return reference(x, row, col)
    sides = [side and measured(side, Form.CODES) for side in (row, col)]
    found = amax_pass(x.shape, x.stride(), x.dtype, x.device, sides[0], sides[1], row is col)
    return (None, None) if found is None else found(x, row, col)


def scale_amaxes(
    x: Tensor,
    row: Request | None,
    col: Request | None,
    amaxes: ScaleAmaxes,
    own: AmaxPass | None,
) -> Amaxes:
    """Return the amaxes of tensors and of rows that scales and folding are made from.

    ``amaxes`` are those that are known; those of earlier steps are resolved by a pass over x.
    ``own`` takes those that are not known.
    """
    by_row, by_col = amaxes
    if isinstance(by_row, DelayedAmax) or isinstance(by_col, DelayedAmax):
        taken = tensor_amaxes(x, row, col)
        by_row, by_col = (
            amax.resolve(one) if isinstance(amax, DelayedAmax) else amax
            for amax, one in zip(amaxes, taken, strict=True)
        )
    if own is not None and (by_row is not None or by_col is not None):
        left = None if by_row is not None else own.row
        right = None if by_col is not None else own.row if own.shared else own.col
        kind = x.shape, x.stride(), x.dtype, x.device
        own = amax_pass(*kind, left, right, row is col)
    if own is not None:
        by_row, by_col = _known_or((by_row, by_col), own(x, row, col))
    if any(side is not None and side.quantizer.format.row_scaled for side in (row, col)):
        by_row, by_col = _known_or((by_row, by_col), _row_amaxes(x, row, col))
    return by_row, by_col


def _known_or(known: Amaxes, found: Amaxes) -> Amaxes:
    return found[0] if known[0] is None else known[0], found[1] if known[1] is None else known[1]


def _row_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Return the amaxes of each side's rows, FP32 (R,); None for a format without a scale a row.

    A row of the transpose is a column of x: all of its tokens, where wgrad contracts them.
    """
    sides = [
        None if side is None or not side.quantizer.format.row_scaled else AmaxSpec(side.hadamard)
        for side in (row, col)
    ]
    whole = torch.zeros(sum(x.shape), dtype=torch.int32, device=x.device).split(list(x.shape))
    bits = [None if side is None else part for side, part in zip(sides, whole, strict=True)]
    launch = _row_launcher(x.shape, x.stride(), x.dtype, x.device, *sides)
    signs = [_sign(*one) for one in zip(sides, (row, col), strict=True)]
    launch((x, *x.stride(), *x.shape, bits[0], signs[0], bits[1], signs[1]))
    by_row, by_col = (None if one is None else one.view(torch.float32) for one in bits)
    return by_row, by_col


@lru_cache(maxsize=4096)
def _row_launcher(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    row: AmaxSpec | None,
    col: AmaxSpec | None,
) -> Launcher:
    tile, *transforms = _tile_and_transforms(row, col)
    varying = (0, *range(5, 9))
    return tile_launcher(row_amax_kernel, shape, tile, *transforms, varying=varying, num_warps=8)


def amax_tile(row: Hadamard | None, col: Hadamard | None, height: int = 64) -> tuple[int, int]:
    """Return rows and columns of a tile that holds both sides' transforms.

    ``height`` is that of a tile without long transforms.
    """
    across, down = (1 if one is None else one.size for one in (row, col))
    longest = max(across, down)
    if longest > MAX_LANES.value:
        return max(32, down), max(32, across)
    rows = max(height, down)
    return rows, max(_TILE, _THREADS * longest) // rows


_BATCH = 1024
_ALIGNED = 4
"""Numbers in 16 bytes."""
_NONE: Iterator[Tensor] = iter(())
_ZEROS: dict[tuple[tuple[int, ...], torch.device, int], Iterator[Tensor]] = {}
"""Zeros that are left of the last fill, by shape, device and stream."""


def zeros_of(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return FP32 zeros, aligned to 16 bytes, in memory that nothing else has or had.

    One fill makes many of them: it takes as long on the CPU as the kernel that needs one. A CUDA
    graph fills its own each time that it runs.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(shape, device=device)
    key = shape, device, torch._C._cuda_getCurrentRawStream(device.index)
    zeros = next(_ZEROS.get(key, _NONE), None)
    if zeros is None:
        _ZEROS[key] = iter(_filled(shape, device).unbind())
        zeros = next(_ZEROS[key])
    return zeros


def _filled(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return zeros (_BATCH, *shape), each of them aligned."""
    size = math.prod(shape)
    apart = torch.zeros((_BATCH, cdiv(size, _ALIGNED) * _ALIGNED), device=device)
    return apart[:, :size].unflatten(1, shape) if shape else apart[:, 0]
