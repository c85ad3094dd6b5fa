"""The sum over a tensor-parallel group, the residual, the norm and the cast, as one operation."""

import socket

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.collectives import reference
from megatron_lowbit.collectives.result import NEW, Result, fill
from megatron_lowbit.errors import TrainingError, say
from megatron_lowbit.numerics import Request
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm


def missing_peers(group: dist.ProcessGroup) -> str | None:
    """Return why the ranks of a group cannot share memory; None where they can.

    All ranks call it together, and all get the same answer.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    found: list = [None] * group.size()
    dist.all_gather_object(found, (socket.gethostname(), device), group=group)
    devices = sorted({device for _, device in found if device is not None})
    if any(device is None for _, device in found):
        return "not every rank has a GPU"
    if len({host for host, _ in found}) > 1:
        return "its ranks are on several hosts"
    if len(devices) < len(found):
        return "some ranks share a GPU"
    for one in devices:
        for other in devices:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot map the memory of GPU {other}"
    return None


TIME_LIMIT_S = 30.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AllReduceNormError(TrainingError):
    """A rank did not come to a call in time, or came with another call."""


class AllReduceNorm:
    """The operation for one group; all of its ranks make it, and call it, in the same order.

    Args:
        group: of the ranks that hold partial sums.
        capacity: bytes of the largest x that is expected; a larger one makes all ranks' buffers
            grow, and says so.
        time_limit: seconds after which a call without all ranks is an error.

    ``choice`` says which implementation was chosen, and why.
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
        if missing is None:
            # Triton is there wherever torch has CUDA, and on few other machines.
            from megatron_lowbit.collectives.paths import bytes_of_paths

            self._share(bytes_of_paths(group.size(), capacity))
            self.choice = f"one kernel over the shared memory of {group.size()} GPUs"
        else:
            self.choice = f"torch.distributed and separate kernels: {missing}"

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
            keep_normalized: whether the rows in x's dtype are wanted beside codes.
            keep_total: whether the sum is wanted as well.
            path: one of ``PATHS`` in place of the table's.
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
            raise ValueError("MXNorm needs a request: its blocks are those of a format")
        if self.buffer is None:
            rows, codes, total = reference.all_reduce_norm(
                self.group, x, residual, norm, gain, request
            )
            keep_rows = keep_normalized or request is None
            made = Result(rows if keep_rows else None, codes, total if keep_total else None)
            return fill(out, made)
        from megatron_lowbit.collectives.launch import launch, plan_of

        self.check()
        keep = keep_normalized, keep_total
        plan = plan_of(self.buffer.ranks, x, residual, norm, gain, request, keep, path)
        if plan.size > self.buffer.size:
            if torch.cuda.is_current_stream_capturing():
                raise ValueError(f"buffers cannot grow in a graph: capacity below {x.nbytes} bytes")
            say(f"all-reduce + norm: buffers grow for {x.nbytes} bytes")
            self._share(plan.size)
        self._follow()
        made = launch(self.buffer, x, residual, norm, gain, request, plan, self.limit, out)
        if not torch.cuda.is_current_stream_capturing():
            self._event.record()
        else:
            self.buffer.captured = True
        return made

    def check(self) -> None:
        """Raise what a kernel has reported; one that still runs reports later."""
        for buffer in (*self._outgrown, self.buffer):
            if buffer is not None and buffer.fault[0]:
                from megatron_lowbit.collectives.launch import reason

                raise AllReduceNormError(f"all-reduce + norm: {reason(buffer)}")

    def _share(self, size: int) -> None:
        from megatron_lowbit.collectives.symmetric_buffer import allocate

        if self.buffer is not None and self.buffer.captured:
            self._outgrown.append(self.buffer)
        self.buffer = allocate(self.group, size)

    def _follow(self) -> None:
        """Order this call after the last one, also where that was on another stream."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream()
        if self._event is None:
            self._event = torch.cuda.Event()
        elif stream != self._stream:
            stream.wait_event(self._event)
        self._stream = stream
