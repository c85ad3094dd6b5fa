"""Launch of the kernel: shared memory, a message's path by its size, programs, and outputs."""

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.collectives.all_reduce_norm import NEW, Result, check_buffers
from megatron_lowbit.collectives.barrier import BARRIERS, BROKEN, CLOCKS, LATE, PROGRAMS, TAGS
from megatron_lowbit.collectives.kernel import all_reduce_norm_kernel
from megatron_lowbit.kernels.launcher import cdiv, multiprocessors
from megatron_lowbit.kernels.norm import normalize_quantize, row_side, statistic, tile_of
from megatron_lowbit.kernels.routes import WIDEST_ROW, Form, takes_norm
from megatron_lowbit.numerics import Quantizer, Request
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm

ONE_STAGE, COMPACT, GATHERED = PATHS = ("one-stage", "compact", "gathered")
"""Names of the paths, in the order of the kernel's numbers."""
_ONE_STAGE_BYTES = {2: 2**40, 4: 2**20, 8: 2**18}
"""Up to how many bytes of x every rank sums up everything by itself, by ranks; 8 not measured."""


class SymmetricBuffer:
    """One rank's part of memory that all ranks of a host can read and write, and all addresses.

    Shared data begin at byte ``data`` of a buffer. ``state`` are the int64 words of a rank for
    itself; ``captured``: graphs use the buffer.

    Args:
        addresses: int64, by rank, on the device; each of ``buffer_bytes`` zeros.
        rank: of this process.
        size: bytes of shared data, which a buffer has twice.
        fault: int64 (4,) zeros in memory that the CPU reads as well.
        owner: keeps the memory alive.
    """

    def __init__(self, addresses: Tensor, rank: int, size: int, fault: Tensor, owner: Any) -> None:
        self.addresses, self.rank, self.ranks = addresses, rank, len(addresses)
        self.data, self.size = _data_offset(self.ranks), size
        self.fault, self.owner, self.captured = fault, owner, False
        words = CLOCKS.value + PROGRAMS.value
        self.state = torch.zeros(words, dtype=torch.int64, device=addresses.device)


def _data_offset(ranks: int) -> int:
    # Words of programs and ranks, for calls in turn, then two shapes.
    return cdiv(8 * (2 * PROGRAMS.value * ranks + 2), 256) * 256


def buffer_bytes(ranks: int, size: int) -> int:
    """Return the bytes of a rank's buffer with ``size`` bytes of shared data, twice."""
    return _data_offset(ranks) + 2 * size


def allocate(group: dist.ProcessGroup, size: int) -> SymmetricBuffer:
    """Allocate a buffer on GPUs that can map one another's memory; all ranks call it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    size = cdiv(size, 256) * 256
    device = torch.device("cuda", torch.cuda.current_device())
    total = buffer_bytes(group.size(), size)
    memory = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric_memory.rendezvous(memory, group)
    fault = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    dist.barrier(group)  # no rank writes into a buffer that is still to be zeroed
    return SymmetricBuffer(addresses, group.rank(), size, fault, (memory, handle))


def bytes_of_paths(ranks: int, capacity: int) -> int:
    """Return the bytes for messages of up to ``capacity`` bytes on the paths chosen for them."""
    small = min(capacity, _one_stage_bytes(ranks))
    slack = ranks * 4 * WIDEST_ROW  # of tiles that reach beyond x
    return max((ranks - 1) * small, 2 * capacity if capacity > small else 0) + slack


def _one_stage_bytes(ranks: int) -> int:
    """Return the table's entry for the next smaller number of ranks in it."""
    return _ONE_STAGE_BYTES[max((r for r in _ONE_STAGE_BYTES if r <= ranks), default=2)]


def launch(
    buffer: SymmetricBuffer,
    x: Tensor,
    residual: Tensor | None,
    norm: MXNorm | RMSNorm,
    gain: Tensor | None,
    request: Request | None,
    keep: tuple[bool, bool],
    path: str | None,
    limit: int,
    out: Result = NEW,
    grow: Callable[[Tensor, int], SymmetricBuffer] | None = None,
) -> Result:
    """Launch the kernel, and the one after it where a format has a tensor scale.

    Arguments are as for ``AllReduceNorm``. ``keep``: whether the normalized rows are wanted as
    well as codes, and the sum. ``grow`` returns a buffer for x with so many bytes of shared data.

    Raises:
        ValueError: no such path, no kernel takes the request, or ``out`` does not fit.
    """
    keep_rows, keep_total = keep[0] or request is None, keep[1]
    rounded = isinstance(norm, MXNorm) and norm.rounded
    if request is not None and (rounded or not takes_norm(x, norm, request)):
        raise ValueError(f"no kernel normalizes and quantizes to {request.quantizer}")
    quantizer = request and request.quantizer
    tensor_scaled = quantizer is not None and quantizer.format.tensor_scaled
    keep_sums = keep_total or tensor_scaled  # maybe only for the second kernel
    given = residual is not None, gain is not None
    plan = _plan(buffer.ranks, multiprocessors(x.device), *x.shape, x.dtype, norm, quantizer,
                 keep_rows, keep_sums, given, path)  # fmt: skip
    if plan.size > buffer.size:
        buffer = grow(x, plan.size)
    template = torch.empty_like(x, device="meta")
    codes = None
    if out.quantized is not None and request is not None:
        codes = row_side(request, template, None, Form.CODES)[2]
    wanted = Result(template if keep_rows else None, codes, template if keep_total else None)
    check_buffers(out, wanted, x.device)
    total = out.total if out.total is not None else torch.empty_like(x) if keep_sums else None
    rows = out.normalized
    if rows is None and keep_rows:
        rows = torch.empty_like(x)
    amax, side, arguments, operand = None, None, (None,) * 4, None
    if tensor_scaled:
        amax = torch.zeros((), dtype=torch.int32, device=x.device)
    elif request is not None:
        side, arguments, operand = row_side(request, x, None, Form.CODES, out.quantized)
    all_reduce_norm_kernel[plan.grid](
        x, residual, total, *x.shape, gain, *plan.statistic, rows, amax, *arguments,
        buffer.addresses, buffer.state, buffer.fault.data_ptr(), buffer.rank, plan.tag,
        x.shape[0] << 32 | x.shape[1], limit, buffer.data, buffer.size, *plan.constants, side,
        plan.even, num_warps=plan.warps, maxnreg=plan.registers, enable_fp_fusion=False,
    )  # fmt: skip
    if tensor_scaled:
        amax = amax.view(torch.float32)
        operand, _ = normalize_quantize(total, norm, request, Form.CODES, gain, amax, out.quantized)
    return Result(rows, operand, total if keep_total else None)


class _Plan(NamedTuple):
    """Launch parameters that follow from the sizes and types of a call's arguments.

    ``constants`` are the kernel's from RANKS to P, ``statistic`` its constant and eps. ``tag``,
    never 0, is what ranks tell one another; ``size`` is the bytes of a buffer's half that are used.
    """

    grid: tuple[int]
    warps: int
    registers: int
    constants: tuple[int, ...]
    statistic: tuple[float, float]
    even: bool
    tag: int
    size: int


@cache
def _plan(
    ranks: int, processors: int, rows: int, columns: int, dtype: torch.dtype,
    norm: MXNorm | RMSNorm, quantizer: Quantizer | None, keep_rows: bool, keep_sums: bool,
    given: tuple[bool, bool], path: str | None,
) -> _Plan:  # fmt: skip
    # TetraJet-v2's bytes of two scales are no matrix of one scale per block.
    has_one_scale = quantizer is None or quantizer.format.scale_bits <= 32
    compact = not keep_rows and not keep_sums and has_one_scale
    if path is None:
        # By measurement.
        small = rows * columns * dtype.itemsize <= _one_stage_bytes(ranks)
        path = ONE_STAGE if small else COMPACT if compact else GATHERED
    fitting = [name for name in PATHS if name != COMPACT or compact]
    if path not in fitting:
        raise ValueError(f"path {path!r} of this call is none of {', '.join(fitting)}")
    block = 16 if quantizer is None else quantizer.format.block
    height, part = tile_of(columns, block)
    span = 1 if path == ONE_STAGE else ranks
    groups = cdiv(cdiv(rows, height), span)
    warps, at_once, registers = _occupancy(groups, columns, processors)
    programs = min(PROGRAMS.value, processors * at_once)
    barriers = cdiv(groups, programs) * (1 if span == 1 else 2)
    if barriers > BARRIERS.value:
        raise ValueError(f"x has {rows} rows: at most {rows * BARRIERS.value // barriers} fit")
    p, constant, eps = statistic(norm, block)
    told = (rows, columns, dtype, norm, quantizer, keep_rows, keep_sums, *given, path)
    tile = height * columns * dtype.itemsize
    return _Plan(
        grid=(min(programs, groups),),
        warps=warps,
        registers=registers,
        constants=(ranks, PATHS.index(path), height, part, cdiv(columns, part), block, p),
        statistic=(constant, eps),
        even=rows % (height * span) == 0 and columns % part == 0,
        tag=1 + zlib.crc32(repr(told).encode()) % TAGS.value,
        size=groups * tile * (ranks - 1 + (ranks if span > 1 else 0)) + 32,
    )


def _occupancy(groups: int, columns: int, processors: int) -> tuple[int, int, int]:
    """Return warps of a program, programs at once on a processor, and registers of a thread.

    All programs of a launch run at once, since they wait for programs of other ranks: the registers
    are as many as allow for it.
    """
    wide = columns > 2**12
    if groups <= processors:
        return (8, 2, 128) if wide else (16, 1, 128)
    if groups <= 32 * processors:
        return (8, 2, 128) if wide else (4, 4, 128)
    return (8, 3, 80) if wide else (4, 6, 80)


def reason(buffer: SymmetricBuffer) -> str:
    """Describe the failure that a kernel has reported."""
    what, rank, mine, theirs = buffer.fault.tolist()
    if what == LATE.value:
        return f"rank {rank} of the group did not come to a call with {_shape(mine)} in time"
    if what == BROKEN.value:
        return f"rank {rank} of the group had given up an earlier call"
    if mine == theirs:
        return f"rank {rank} of the group came with another norm, output, path or dtype"
    shown = f"{_shape(theirs)}, rank {buffer.rank} with {_shape(mine)}"
    return f"rank {rank} of the group came with {shown}"


def _shape(word: int) -> str:
    return f"{word >> 32} x {word & 0xFFFFFFFF}"
