"""The sum over a tensor-parallel group, the residual, the norm and the cast, as one operation.

One kernel computes it over memory that the GPUs of a host share (``launch.py``). Elsewhere
``torch.distributed`` and torch compute it step by step.
"""

import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lowbit.errors import TrainingError, say
from megatron_lowbit.numerics import QuantizedTensor, Request, quantize_both
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm

TIME_LIMIT_S = 30.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AllReduceNormError(TrainingError):
    """A rank did not come to a call in time, or came with another call."""


class Result(NamedTuple):
    """Normalized rows, their codes, and the sum with the residual; None for what is not wanted.

    As a call's ``out`` it holds the tensors that are to be filled; those that are None are new.
    """

    normalized: Tensor | None = None
    quantized: QuantizedTensor | None = None
    total: Tensor | None = None


NEW = Result()
"""No buffer of the caller's."""


class AllReduceNorm:
    """The operation for one group; all of its ranks make it, and call it, in the same order.

    Args:
        group: of the ranks that hold partial sums.
        capacity: bytes of the largest x that is expected; a larger one makes all ranks' buffers
            grow, and says so.
        time_limit: seconds after which a call without all ranks is an error.

    ``choice`` names the implementation, and why it was chosen.
    """

    def __init__(
        self, group: dist.ProcessGroup, capacity: int, time_limit: float = TIME_LIMIT_S
    ) -> None:
        self.group, self.buffer = group, None
        self._outgrown: list = []  # buffers that graphs go on using
        self.limit = int(time_limit * 1e9)
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        missing = missing_peers(group)
        if missing is not None:
            self.choice = f"torch.distributed and separate kernels: {missing}"
            return
        # Triton is there wherever torch has CUDA, and on few other machines.
        from megatron_lowbit.collectives.launch import allocate, bytes_of_paths

        self.buffer = allocate(group, bytes_of_paths(group.size(), capacity))
        self.choice = f"one kernel over the shared memory of {group.size()} GPUs"

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: MXNorm | RMSNorm,
        gain: Tensor | None = None,
        request: Request | None = None,
        *,
        keep_normalized: bool = False,
        keep_total: bool = True,
        path: str | None = None,
        out: Result = NEW,
    ) -> Result:
        """Normalize the sum of all ranks' x (R, C) and the residual.

        Args:
            x: this rank's partial sum, FP32, BF16 or FP16, contiguous.
            residual: (R, C) in x's dtype, the same on all ranks.
            norm: of each row.
            gain: (C,), of an RMSNorm.
            request: how the normalized rows are quantized, along rows, in place of rows in x's
                dtype. RMSNorm's are rounded to x's dtype before, as between two layers.
            keep_normalized: whether the rows in x's dtype are wanted as well as codes.
            keep_total: whether the sum is wanted as well.
            path: one of ``launch.PATHS`` in place of the table's.
            out: tensors to fill; what is None there is new.

        Raises:
            ValueError: the kernel does not take x or the request, x is larger than the capacity
                while a graph is captured, or a tensor of ``out`` has another shape or dtype, is not
                contiguous, or is for what is not wanted.
            AllReduceNormError: an earlier call went wrong.
        """
        if x.dim() != 2 or not x.is_contiguous() or x.dtype not in DTYPES:
            raise ValueError(
                f"x is a contiguous FP32, BF16 or FP16 matrix, not {x.dtype} {tuple(x.shape)}"
            )
        if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
            raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, unlike x")
        if gain is not None and isinstance(norm, MXNorm):
            raise ValueError("MXNorm takes no gain: it belongs into the next weight")
        if request is None and isinstance(norm, MXNorm):
            raise ValueError("MXNorm needs a request, whose format gives the blocks")
        if self.buffer is None:
            computed = all_reduce_norm(self.group, x, residual, norm, gain, request)
            if not keep_normalized and request is not None:
                computed = computed._replace(normalized=None)
            return fill(out, computed if keep_total else computed._replace(total=None))
        from megatron_lowbit.collectives.launch import launch

        self.check()
        captures = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream()
        if not captures and self._event is not None and stream != self._stream:
            stream.wait_event(self._event)  # after the last call, which was on another stream
        keep = keep_normalized, keep_total
        result = launch(
            self.buffer, x, residual, norm, gain, request, keep, path, self.limit, out, self._grow
        )
        if captures:
            self.buffer.captured = True
            return result
        self._event = self._event or torch.cuda.Event()
        self._event.record()
        self._stream = stream
        return result

    def check(self) -> None:
        """Raise what a kernel has reported; one that still runs reports later."""
        for buffer in (*self._outgrown, self.buffer):
            if buffer is not None and buffer.fault[0]:
                from megatron_lowbit.collectives.launch import reason

                raise AllReduceNormError(f"all-reduce + norm: {reason(buffer)}")

    def _grow(self, x: Tensor, size: int) -> Any:
        """Return a larger ``SymmetricBuffer``, for a call with x."""
        from megatron_lowbit.collectives.launch import allocate

        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"buffers cannot grow in a graph: capacity below {x.nbytes} bytes")
        say(f"all-reduce + norm: buffers grow for {x.nbytes} bytes")
        if self.buffer.captured:
            self._outgrown.append(self.buffer)
        self.buffer = allocate(self.group, size)
        return self.buffer


def missing_peers(group: dist.ProcessGroup) -> str | None:
    """Return the reason why the ranks of a group cannot share memory; None where they can.

    All ranks call it together, and all get the same answer.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    ranks: list = [None] * group.size()
    dist.all_gather_object(ranks, (socket.gethostname(), device), group=group)
    hosts, devices = ({*values} for values in zip(*ranks, strict=True))
    if None in devices:
        return "not every rank has a GPU"
    if len(hosts) > 1:
        return "its ranks are on several hosts"
    if len(devices) < len(ranks):
        return "some ranks share a GPU"
    for gpu in sorted(devices):
        for other in sorted(devices - {gpu}):
            if not torch.cuda.can_device_access_peer(gpu, other):
                return f"GPU {gpu} cannot map the memory of GPU {other}"
    return None


def all_reduce_norm(
    group: dist.ProcessGroup,
    x: Tensor,
    residual: Tensor | None,
    norm: MXNorm | RMSNorm,
    gain: Tensor | None,
    request: Request | None,
) -> Result:
    """Compute the operation by ``torch.distributed`` and torch, step by step.

    The ranks' rows are added up in FP32, in the order of the group's library, the residual last.
    RMSNorm's rows are quantized as they are between two layers, in x's dtype; MXNorm's in FP32.
    """
    total = x.to(torch.float32, copy=True)
    dist.all_reduce(total, group=group)
    if residual is not None:
        total = total + residual.float()
    total = total.to(x.dtype)
    normalized = norm.normalize(total, 1 if request is None else request.quantizer.format.block)
    if gain is not None:
        normalized = normalized * gain.float()
    rounded = normalized.to(x.dtype)
    if request is None:
        return Result(rounded, None, total)
    source = rounded if isinstance(norm, RMSNorm) else normalized
    return Result(rounded, quantize_both(source, request, None)[0], total)


def fill(out: Result, result: Result) -> Result:
    """Copy a result into the buffers of ``out``; what has none stays as it is.

    Raises:
        ValueError: a buffer for what is not wanted, or unlike it.
    """
    made = result.normalized if result.quantized is None else result.quantized
    check_buffers(out, result, tensors_of(made)[0].device)
    for buffer, value in zip(out, result, strict=True):
        if buffer is not None:
            for target, source in zip(tensors_of(buffer), tensors_of(value), strict=True):
                target.copy_(source)
    pairs = zip(out, result, strict=True)
    return Result(*(value if buffer is None else buffer for buffer, value in pairs))


def check_buffers(out: Result, wanted: Result, device: torch.device) -> None:
    """Raise ValueError unless a call on ``device`` can fill ``out`` as it makes ``wanted``.

    That may be on the meta device, and has None for what the call does not make.
    """
    for name, buffer, expected in zip(Result._fields, out, wanted, strict=True):
        if buffer is None:
            continue
        if expected is None:
            raise ValueError(f"out.{name}: this call does not make it")
        if isinstance(expected, QuantizedTensor) and buffer.format != expected.format:
            formats = f"{buffer.format}, the call's {expected.format}"
            raise ValueError(f"out.{name}: its format is {formats}")
        for x, y in zip(tensors_of(buffer), tensors_of(expected), strict=True):
            if x.device != device:
                raise ValueError(f"out.{name}: it is on {x.device}, x on {device}")
            if (x.shape, x.dtype) != (y.shape, y.dtype) or not x.is_contiguous():
                raise ValueError(
                    f"out.{name}: {x.dtype} {tuple(x.shape)} is no contiguous {y.dtype} "
                    f"{tuple(y.shape)}"
                )


def tensors_of(value: Tensor | QuantizedTensor) -> list[Tensor]:
    """Return the tensors of one field of a result."""
    if isinstance(value, Tensor):
        return [value]
    return [value.codes, value.scales, value.tensor_scale]


class _AllReduceRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, residual: Tensor, gain: Tensor, eps: float, run: AllReduceNorm,
        request: Request | None,
    ):  # fmt: skip
        rows = [tensor.reshape(-1, x.shape[-1]).contiguous() for tensor in (x, residual)]
        # No views: megatron-core replaces a view by a new tensor, which nothing was handed for.
        normalized, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in rows)
        out = Result(normalized=normalized.view_as(rows[0]), total=total.view_as(rows[0]))
        codes = run(*rows, RMSNorm(eps), gain, request, keep_normalized=True, out=out).quantized
        ctx.save_for_backward(total, gain)
        ctx.eps = eps
        return normalized, total, codes

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_normalized: Tensor, grad_total: Tensor, _):
        total, gain = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            normalized = F.rms_norm(total, gain.shape, gain, ctx.eps)
        grad, grad_gain = torch.autograd.grad(normalized, (total, gain), grad_normalized)
        # An all-reduce's backward is no all-reduce: every rank has the whole gradient.
        grad = grad + grad_total
        return grad, grad, grad_gain, None, None, None


def all_reduce_rms_norm(
    run: AllReduceNorm,
    x: Tensor,
    residual: Tensor,
    gain: Tensor,
    eps: float,
    request: Request | None = None,
) -> tuple[Tensor, Tensor, QuantizedTensor | None]:
    """Normalize the sum of all ranks' x (..., K) and the residual by RMSNorm times gain (K,).

    Gradients are as of an all-reduce, an addition and torch's RMSNorm one after another.

    Returns:
        The normalized rows (..., K), the sum (..., K), and the rows' codes (R, K) where a
        ``request`` says how they are quantized.
    """
    return _AllReduceRMSNorm.apply(x, residual, gain, eps, run, request)
