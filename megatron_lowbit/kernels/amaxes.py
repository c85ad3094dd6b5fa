"""Amaxes of a matrix and of its transpose, from one pass over it."""

import ctypes
import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.kernels.amax import AmaxSpec, amax_kernel
from megatron_lowbit.kernels.hadamard import MAX_LANES
from megatron_lowbit.kernels.launcher import Launcher, cdiv, tile_launcher
from megatron_lowbit.kernels.means import splits_mean
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sides import draws_signs, signs_of, transform_of
from megatron_lowbit.numerics import Amaxes, DelayedAmax, Request, ScaleAmaxes
from megatron_lowbit.numerics import tensor_amaxes as reference

BITS = {6: torch.int32, 8: torch.int32}
"""Indices of amaxes among the kernel's arguments, and the dtype as which it takes them."""
AMAX_TOKENS = 12
"""Index of the numbers of rows."""
_TILE, _THREADS = 8192, 128
"""Elements of a tile; threads of a program, each of which takes whole transforms."""
_SELDOM_TAKEN = (64, 256)
"""Tile of a pass that seldom takes an amax: few programs, which end at once."""


NO_TRANSFORM = AmaxSpec()


class MatrixKind(NamedTuple):
    """The part of a matrix that a launch depends on."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


def kind_of(x: Tensor) -> MatrixKind:
    """Return the part of a matrix that a launch depends on."""
    return MatrixKind(x.shape, x.stride(), x.dtype, x.device)


def amax_spec(request: Request, form: Form) -> AmaxSpec | None:
    """Return the amax that an operand's scales are made from: for folding, before any transform."""
    format = request.quantizer.format
    if format.tensor_scaled or format.row_scaled:
        return AmaxSpec(transform_of(request.hadamard), format.row_scaled)
    return NO_TRANSFORM if form is Form.FOLDED else None


class AmaxPass(NamedTuple):
    """A pass over matrices of one kind; ``shared``: the column side has the row side's amax."""

    launch: Launcher
    row: AmaxSpec | None
    col: AmaxSpec | None
    by_rows: bool
    shared: bool

    def __call__(
        self,
        x: Tensor,
        row: Request | None,
        col: Request | None,
        earlier: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Amaxes:
        """Take the amaxes of x (R, C), FP32, after the transforms of a call's requests.

        Nothing is taken where both ``earlier`` ones are given and not negative.
        """
        sides = (self.row, row), (None if self.shared else self.col, col)
        rows: tuple[Tensor | None, ...] = (None, None)
        if self.by_rows:
            rows = torch.zeros(sum(x.shape), device=x.device).split(list(x.shape))
        amaxes, arguments = [], []
        for (spec, request), of_rows in zip(sides, rows, strict=True):
            amax, signs = None, 0
            if spec is not None:
                amax = of_rows if spec.by_rows else zeros_of((), x.device)
                if request is not None and spec.transform is not None:
                    signs = signs_of(request.hadamard, request.sign_key)
            amaxes.append(amax)
            arguments += [amax, signs]
        self.launch((x, *x.stride(), *x.shape, None, *arguments, *earlier, None))
        return amaxes[0], amaxes[0] if self.shared else amaxes[1]


@lru_cache(maxsize=4096)
def amax_pass(
    matrix: MatrixKind,
    row: AmaxSpec | None,
    col: AmaxSpec | None,
    same: bool = False,
    seldom: bool = False,
) -> AmaxPass | None:
    """Return the pass for matrices of one kind; None where no side has an amax.

    Args:
        matrix: kind of the matrices.
        row, col: amaxes of both sides.
        same: both sides are of one request.
        seldom: True for a pass that is given earlier amaxes.
    """
    specs = [spec for spec in (row, col) if spec is not None]
    if not specs:
        return None
    by_rows = any(spec.by_rows for spec in specs)
    shared = len(specs) == 2 and not by_rows and (same or row == col == NO_TRANSFORM)
    sides = row, None if shared else col
    tile = _SELDOM_TAKEN if seldom else amax_tile(row, col)
    varying = [0]
    for first, side in zip((6, 8), sides, strict=True):
        varying += [first] if side is not None and side.by_rows else []
        varying += [first + 1] if side is not None and draws_signs(side.transform) else []
    varying += [10, 11] if seldom else []
    warps = 8 if seldom or by_rows else 4
    launch = tile_launcher(
        amax_kernel, matrix.shape, tile, *sides, 0, varying=varying, views=BITS, num_warps=warps
    )
    return AmaxPass(launch, row, col, by_rows, shared)


def matrix_amax(x: Tensor, earlier: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:
    """Return the amax (FP32 scalar) of x (R, C); a NaN is the largest.

    It is zero where both ``earlier`` ones, FP32 scalars, are given and known: not negative.
    """
    take = amax_pass(kind_of(x), NO_TRANSFORM, None, seldom=earlier[0] is not None)
    return take(x, None, None, earlier)[0]


def tensor_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Compute what :func:`megatron_lowbit.numerics.tensor_amaxes` does, in one pass over x."""
    if not x.numel() or splits_mean(row, col):
        return reference(x, row, col)
    specs = [
        AmaxSpec(transform_of(side.hadamard))
        if side and side.quantizer.format.tensor_scaled
        else None
        for side in (row, col)
    ]
    take = amax_pass(kind_of(x), specs[0], specs[1], row is col)
    return (None, None) if take is None else take(x, row, col)


def scale_amaxes(
    x: Tensor, row: Request | None, col: Request | None, known: ScaleAmaxes, take: AmaxPass
) -> Amaxes:
    """Return the amaxes of tensors and of rows that scales and folding are made from.

    ``take`` takes amaxes that are not ``known``, and the tensor's own where amaxes of earlier steps
    record it.
    """
    if known[0] is None and known[1] is None:
        return take(x, row, col)
    specs = [
        None if isinstance(amax, Tensor) else spec
        for amax, spec in zip(known, (take.row, take.col), strict=True)
    ]
    rest = amax_pass(kind_of(x), specs[0], specs[1], row is col)
    taken = (None, None) if rest is None else rest(x, row, col)
    by_row, by_col = (
        amax.resolve(now) if isinstance(amax, DelayedAmax) else now if amax is None else amax
        for amax, now in zip(known, taken, strict=True)
    )
    return by_row, by_col


def amax_tile(row: AmaxSpec | None, col: AmaxSpec | None, height: int = 64) -> tuple[int, int]:
    """Return rows and columns of a tile that holds both sides' transforms.

    ``height`` is the height of a tile without long transforms.
    """
    across, down = (
        1 if spec is None or spec.transform is None else spec.transform.size for spec in (row, col)
    )
    longest = max(across, down)
    if longest > MAX_LANES.value:
        return max(32, down), max(32, across)
    rows = max(height, down)
    return rows, max(_TILE, _THREADS * longest) // rows


_BATCH = 1024
_ALIGNED = 4
"""Numbers in 16 bytes."""
_ZEROS: dict[tuple[tuple[int, ...], torch.device, int], tuple[int, list[Tensor]]] = {}
"""Zeros that are left of the last fill, by shape, device and stream, behind the number of the
capture that fills them; 0 outside of CUDA graphs."""


def zeros_of(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return FP32 zeros, aligned to 16 bytes, in memory that nothing else has or had.

    One fill makes many of them: it takes as long on the CPU as the kernel that needs one. A CUDA
    graph fills its own each time that it runs.
    """
    if device.type != "cuda":
        return torch.zeros(shape, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    key = shape, device, stream
    capture = _capture_number(stream) if torch.cuda.is_current_stream_capturing() else 0
    if key not in _ZEROS or _ZEROS[key][0] != capture:
        _ZEROS[key] = capture, []
    zeros = _ZEROS[key][1]
    if not zeros:
        zeros += filled(shape, device)
    return zeros.pop()


def _capture_number(stream: int) -> int:
    """Return the number that CUDA has given to the capture of a stream, unique in a process."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    results = ctypes.byref(status), ctypes.byref(number)
    error = _driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *results, None, None, None)
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo_v2 failed with CUresult {error}")
    return number.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@torch.inference_mode(False)  # Later calls take them in training, too.
def filled(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return many zeros, each of them aligned, of one fill."""
    size = math.prod(shape)
    rows = torch.zeros((_BATCH, cdiv(size, _ALIGNED) * _ALIGNED), device=device)
    return rows[:, :size].view(_BATCH, *shape).unbind()
