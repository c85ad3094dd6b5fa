"""Launches the kernel: which path, how many programs, outputs allocated."""

import zlib
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megatron_lowbit.collectives import kernel, paths
from megatron_lowbit.collectives.barrier import BARRIERS, BROKEN, LATE, PROGRAMS, TAGS
from megatron_lowbit.collectives.result import NEW, Result, check_buffer
from megatron_lowbit.collectives.symmetric_buffer import SymmetricBuffer
from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.norm import normalize_quantize, row_side, statistic, tile_of
from megatron_lowbit.kernels.routes import Form, takes_norm
from megatron_lowbit.numerics import Quantizer, Request
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm


def plan_of(
    ranks: int,
    x: Tensor,
    residual: Tensor | None,
    norm: MXNorm | RMSNorm,
    gain: Tensor | None,
    request: Request | None,
    keep: tuple[bool, bool],
    path: str | None,
) -> "Plan":
    """Plan a call. ``keep``: whether the normalized rows and the sum are wanted beside codes.

    Raises:
        ValueError: no such path, or no kernel takes the request.
    """
    rounded = isinstance(norm, MXNorm) and norm.rounded
    if request is not None and (rounded or not takes_norm(x, norm, request)):
        raise ValueError(f"no kernel normalizes and quantizes to {request.quantizer}")
    return _plan(
        ranks, _processors(x.device), *x.shape, x.dtype, norm, request and request.quantizer,
        *keep, residual is not None, gain is not None, path,
    )  # fmt: skip


class Plan(NamedTuple):
    """Launch parameters that follow from the sizes and kinds of a call's arguments alone.

    ``constants`` are the kernel's from RANKS to P, ``statistic`` its constant and eps. ``rows``
    and ``sums`` say whether the normalized rows and the sums are written, the sums maybe only for
    a second kernel. ``tag``, never 0, and ``shape`` are what ranks tell one another; ``size`` is
    the bytes of a buffer's half that are used.
    """

    grid: tuple[int]
    warps: int
    registers: int
    constants: tuple[int, ...]
    statistic: tuple[float, float]
    even: bool
    keep_total: bool
    rows: bool
    sums: bool
    tensor_scaled: bool
    tag: int
    shape: int
    size: int


@cache
def _plan(
    ranks: int, processors: int, rows: int, columns: int, dtype: torch.dtype,
    norm: MXNorm | RMSNorm, quantizer: Quantizer | None, keep_rows: bool, keep_total: bool,
    has_residual: bool, has_gain: bool, path: str | None,
) -> Plan:  # fmt: skip
    tensor_scaled = quantizer is not None and quantizer.format.tensor_scaled
    sums = keep_total or tensor_scaled
    keep_rows = keep_rows or quantizer is None
    # Codes are gathered with a scale a block.
    compact = not keep_rows and not sums and not quantizer.format.row_scaled
    block = 16 if quantizer is None else quantizer.format.block
    height, part = tile_of(columns, block)
    if path is None:
        path = paths.choose_path(ranks, rows * columns * dtype.itemsize, compact)
    if path not in paths.PATHS or (path == paths.COMPACT and not compact):
        fitting = [name for name in paths.PATHS if name != paths.COMPACT or compact]
        raise ValueError(f"path {path!r} of this call is none of {', '.join(fitting)}")
    tile = height * columns * dtype.itemsize
    span = 1 if path == paths.ONE_STAGE else ranks
    groups = cdiv(cdiv(rows, height), span)
    warps, at_once, registers = _occupancy(groups, columns, processors)
    programs = min(PROGRAMS.value, processors * at_once)
    barriers = cdiv(groups, programs) * (1 if span == 1 else 2)
    if barriers > BARRIERS.value:
        raise ValueError(f"x has {rows} rows: at most {rows * BARRIERS.value // barriers} fit")
    p, constant, eps = statistic(norm, block)
    told = (rows, columns, dtype, norm, quantizer, keep_rows, sums, has_residual, has_gain, path)
    return Plan(
        grid=(min(programs, groups),),
        warps=warps,
        registers=registers,
        constants=(ranks, triton.next_power_of_2(ranks), paths.PATHS.index(path), height, part,
                   cdiv(columns, part), block, p),
        statistic=(constant, eps),
        even=rows % (height * span) == 0 and columns % part == 0,
        keep_total=keep_total,
        rows=keep_rows,
        sums=sums,
        tensor_scaled=tensor_scaled,
        tag=1 + zlib.crc32(repr(told).encode()) % TAGS.value,
        shape=rows << 32 | columns,
        size=groups * tile * (ranks - 1 + (ranks if span > 1 else 0)) + 32,
    )  # fmt: skip


def _occupancy(groups: int, columns: int, processors: int) -> tuple[int, int, int]:
    """Return warps of a program, programs at once on a processor, and registers of a thread.

    All programs of a launch run at once, since they wait for those of other ranks: the registers
    are as many as allow for it.
    """
    wide = columns > 2**12
    if groups <= processors:
        return (8, 2, 128) if wide else (16, 1, 128)
    if groups <= 32 * processors:
        return (8, 2, 128) if wide else (4, 4, 128)
    return (8, 3, 80) if wide else (4, 6, 80)


def launch(
    buffer: SymmetricBuffer,
    x: Tensor,
    residual: Tensor | None,
    norm: MXNorm | RMSNorm,
    gain: Tensor | None,
    request: Request | None,
    plan: Plan,
    limit: int,
    out: Result = NEW,
) -> Result:
    """Launch the kernel, and the one after it where a format has a tensor scale."""
    _check_buffers(x, request, plan, out)
    total = out.total if out.total is not None else torch.empty_like(x) if plan.sums else None
    y = out.normalized if out.normalized is not None else torch.empty_like(x) if plan.rows else None
    amax_out, side, arguments, made = None, None, (None, None, None, None), None
    if plan.tensor_scaled:
        amax_out = torch.zeros((), dtype=torch.int32, device=x.device)
    elif request is not None:
        side, arguments, made = row_side(request, x, None, Form.CODES, out.quantized)
    kernel.all_reduce_norm_kernel[plan.grid](
        x, residual, total, *x.shape, gain, *plan.statistic, y, amax_out, *arguments,
        buffer.addresses, buffer.state, buffer.fault.data_ptr(), buffer.rank, plan.tag, plan.shape,
        limit, buffer.data, buffer.size, *plan.constants, side, plan.even,
        num_warps=plan.warps, maxnreg=plan.registers, enable_fp_fusion=False,
    )  # fmt: skip
    if plan.tensor_scaled:
        amax = amax_out.view(torch.float32)
        made, _ = normalize_quantize(total, norm, request, Form.CODES, gain, amax, out.quantized)
    return Result(y, made, total if plan.keep_total else None)


def _check_buffers(x: Tensor, request: Request | None, plan: Plan, out: Result) -> None:
    """Raise ValueError for a caller's buffer that the kernel could not fill."""
    like = torch.empty_like(x, device="meta")
    made = None
    if request is not None and out.quantized is not None:
        made = row_side(request, like, None, Form.CODES)[2]
    wanted = Result(like if plan.rows else None, made, like if plan.keep_total else None)
    for name, buffer, value in zip(Result._fields, out, wanted, strict=True):
        if buffer is not None:
            check_buffer(name, buffer, value, x.device)


@cache
def _processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def reason(buffer: SymmetricBuffer) -> str:
    """Describe the failure that a kernel has reported."""
    what, who, mine, theirs = buffer.fault.tolist()
    if what == LATE.value:
        return f"rank {who} of the group did not come to a call with {_shape(mine)} in time"
    if what == BROKEN.value:
        return f"rank {who} of the group had given up an earlier call"
    if mine == theirs:
        return f"rank {who} of the group came with another norm, output, path or dtype"
    shown = f"{_shape(theirs)}, rank {buffer.rank} with {_shape(mine)}"
    return f"rank {who} of the group came with {shown}"


def _shape(word: int) -> str:
    return f"{word >> 32} x {word & 0xFFFFFFFF}"
