"""A GEMM with a factor in device memory and a sum to add to, which torch does not pass on.

Tensor scales are made on the device. Multiplied into the sums here they cost nothing; a pass over
the product takes a tenth of the GEMM's time. So does adding a weight's gradient to what earlier
microbatches gave.

cuBLAS has faster kernels for a beta of 1 in host memory, where it can see it: they add to memory
without reading it back. Alpha must lie where beta does. A factor of FP8 operands is therefore
passed as an operand's scale, which is a pointer in either case. BF16 operands have no scale: a
factor is alpha, on the device, and so beta is there, too. Constants are from cublasLt.h.

cuBLAS ranks its algorithms by a model of the GPU. Products of a kind that comes often are timed,
and the fastest algorithm that gives the bits of the first one is taken from then on.
"""

import ctypes
import math
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TYPES = {  # cudaDataType_t
    torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
_COMPUTE_FP32 = 68
_POINTER_MODE, _TRANSA, _TRANSB = 2, 3, 4  # cublasLtMatmulDescAttributes_t
_IN_HOST_MEMORY, _ON_DEVICE = 0, 1
_SCALES = 17, 18  # A_SCALE_POINTER, B_SCALE_POINTER
_WORKSPACE_LIMIT, _ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t
_SPLIT_K = 2  # cublasLtMatmulAlgoConfigAttributes_t
_WORKSPACE = 32 * 2**20
_MOST_ALGORITHMS = 8
_OFTEN = 8
"""Calls of a kind after which its algorithms are timed; numbers of tokens that vary come once."""
_ROUNDS = 5
"""Times that each of them is timed; the shortest counts."""
_LARGEST = 2**29
"""Most bytes of a product whose algorithms are timed, for which it is copied twice."""
_ZERO, _ONE = c_float(0.0), c_float(1.0)
_LOCK = Lock()


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Matrix(NamedTuple):
    """A matrix as cuBLAS sees it, columns first: size, distance of columns, alignment in bytes."""

    dtype: torch.dtype
    rows: int
    columns: int
    step: int
    transposed: bool
    alignment: int


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    factor: Tensor | tuple[Tensor, Tensor] | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    beta: bool = True,
) -> Tensor:
    """Compute ``factor * a @ b.T``, or ``out + factor * a @ b.T``, rounded once.

    Sums are in FP32; FP8 tensor cores' sums are promoted.

    Args:
        a, b: BF16 (M, K) and (N, K), rows or columns contiguous, on one GPU; or FP8, not both E5M2,
            rows contiguous, all sizes multiples of 16.
        factor: FP32 scalar on the same GPU; for FP8 also two, which are multiplied, aligned to 16
            bytes; None for 1.
        out_dtype: of the result (M, N): BF16 or FP32.
        out: contiguous (M, N) in ``out_dtype`` for the result, which has what the product is added
            to; None for a new one.
        beta: False to write to ``out`` without adding.

    Raises:
        RuntimeError: cuBLASLt has no algorithm for these matrices, or fails.
    """
    y, adds = out, beta and out is not None
    if y is None:
        y = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if not a.numel() or not b.numel():
        return y if adds else y.zero_()
    a, b = _dense(a), _dense(b)
    # cuBLAS counts columns first: the transpose of y is b times the transpose of a.
    left, right, result = _matrix(b), _matrix(a, transposed=True), _matrix(y)
    is_fp8 = a.dtype.itemsize == 1
    alpha_at: object = byref(_ONE)
    beta_at: object = byref(_ONE if adds else _ZERO)
    on_device = isinstance(factor, Tensor) and not is_fp8
    if on_device:
        alpha_at, beta_at = factor.data_ptr(), _constant(float(adds), a.device).data_ptr()
    plan = _plan(left, right, result, a.device, on_device)
    stream = torch.cuda.current_stream(a.device).cuda_stream

    def multiply(algorithm: _Heuristic) -> None:
        workspace = torch.empty(algorithm.workspace, dtype=torch.uint8, device=a.device)
        layouts = plan.layouts
        _call(
            "cublasLtMatmul", torch.cuda.current_blas_handle(), plan.description, alpha_at,
            b.data_ptr(), layouts[0], a.data_ptr(), layouts[1], beta_at, y.data_ptr(), layouts[2],
            y.data_ptr(), layouts[2], byref(algorithm), workspace.data_ptr(), algorithm.workspace,
            stream,
        )  # fmt: skip

    with _LOCK:  # the description of all such calls has the scales
        if is_fp8:
            given = factor if isinstance(factor, tuple) else (factor, None)
            scales = (c_void_p(None if scale is None else scale.data_ptr()) for scale in given)
            pointers = dict(zip(_SCALES, scales, strict=True))
            _set("cublasLtMatmulDescSetAttribute", plan.description, pointers)
        plan.calls += 1
        timed = plan.calls >= _OFTEN and len(plan.algorithms) > 1 and y.nbytes <= _LARGEST
        if timed and not torch.cuda.is_current_stream_capturing():
            plan.algorithms = [_fastest(multiply, plan.algorithms, y)]
        multiply(plan.algorithms[0])
    return y


def _fastest(
    multiply: Callable[[_Heuristic], None], algorithms: list[_Heuristic], y: Tensor
) -> _Heuristic:
    """Return the fastest of the algorithms that compute the bits of the first one.

    ``multiply`` computes y, or adds to it, by an algorithm; y is left as it was.
    """
    before, equal = y.clone(), []
    for algorithm in algorithms:
        multiply(algorithm)
        if not equal:
            first = y.clone()
        if torch.equal(y.view(torch.uint8), first.view(torch.uint8)):
            equal.append(algorithm)
        y.copy_(before)
    times = [math.inf] * len(equal)
    for _ in range(_ROUNDS):
        for i, algorithm in enumerate(equal):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            multiply(algorithm)
            end.record()
            end.synchronize()
            times[i] = min(times[i], start.elapsed_time(end))
    y.copy_(before)
    return equal[times.index(min(times))]


def _dense(x: Tensor) -> Tensor:
    """Copy x unless its rows or its columns are contiguous and apart from each other."""
    (rows, columns), (down, across) = x.shape, x.stride()
    by_rows, by_columns = across == 1 and down >= columns, down == 1 and across >= rows
    return x if by_rows or by_columns else x.contiguous()


def _matrix(x: Tensor, transposed: bool = False) -> _Matrix:
    """Describe x (R, C), or its transpose, as an operand in x's own layout."""
    by_rows = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    rows, columns = x.shape[::-1] if by_rows else x.shape
    step = x.stride(0) if by_rows else x.stride(1)
    address = x.data_ptr()
    alignment = min(256, address & -address)
    return _Matrix(x.dtype, rows, columns, step, by_rows is not transposed, alignment)


@dataclass
class _Plan:
    """Calls of one kind: their description, layouts of three matrices, and number up to now.

    ``algorithms`` are cuBLAS's, its first choice first, until they have been timed.
    """

    description: c_void_p
    layouts: list[c_void_p]
    algorithms: list[_Heuristic]
    calls: int = 0


@cache
def _plan(
    left: _Matrix, right: _Matrix, out: _Matrix, device: torch.device, on_device: bool
) -> _Plan:
    """Return the plan of such calls; ``on_device``: alpha and beta are in device memory."""
    description, preference = c_void_p(), c_void_p()
    _call("cublasLtMatmulDescCreate", byref(description), c_int(_COMPUTE_FP32), c_int(0))
    _set("cublasLtMatmulDescSetAttribute", description, {
        _POINTER_MODE: c_int32(_ON_DEVICE if on_device else _IN_HOST_MEMORY),
        _TRANSA: c_int32(left.transposed),
        _TRANSB: c_int32(right.transposed),
    })  # fmt: skip
    layouts = []
    for matrix in (left, right, out):
        layouts.append(c_void_p())
        _call("cublasLtMatrixLayoutCreate", byref(layouts[-1]), c_int(_TYPES[matrix.dtype]),
              c_uint64(matrix.rows), c_uint64(matrix.columns), c_int64(matrix.step))  # fmt: skip
    _call("cublasLtMatmulPreferenceCreate", byref(preference))
    alignments = (ctypes.c_uint32(matrix.alignment) for matrix in (left, right, out, out))
    _set("cublasLtMatmulPreferenceSetAttribute", preference, {
        _WORKSPACE_LIMIT: c_uint64(_WORKSPACE), **dict(zip(_ALIGNMENTS, alignments, strict=True)),
    })  # fmt: skip
    found, count = (_Heuristic * _MOST_ALGORITHMS)(), c_int()
    _call(
        "cublasLtMatmulAlgoGetHeuristic", c_void_p(torch.cuda.current_blas_handle()), description,
        *layouts, layouts[2], preference, c_int(len(found)), found, byref(count),
    )  # fmt: skip
    _call("cublasLtMatmulPreferenceDestroy", preference)
    # Sums that are split along K may be added up in an order that changes from call to call.
    first, *others = found[: count.value]
    whole = [one for one in (first, *others) if not _splits_k(one)]
    return _Plan(description, layouts, [first] if _splits_k(first) else whole)


def _splits_k(algorithm: _Heuristic) -> bool:
    number, written = c_int32(), c_size_t()
    _call("cublasLtMatmulAlgoConfigGetAttribute", byref(algorithm), c_int(_SPLIT_K), byref(number),
          c_size_t(ctypes.sizeof(number)), byref(written))  # fmt: skip
    return number.value > 1


def _set(function: str, target: c_void_p, attributes: dict[int, Any]) -> None:
    for name, value in attributes.items():
        _call(function, target, c_int(name), byref(value), c_size_t(ctypes.sizeof(value)))


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)


@cache
def _library() -> ctypes.CDLL:
    # The one that torch has loaded, found by its name.
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    # Handle, description; factor, two matrices with layouts, a zero, two more; algorithm, workspace
    # and its size, stream. Declared, so that plain numbers go in.
    library.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with cublasStatus_t {status}")
