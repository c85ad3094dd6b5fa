"""Launches the kernel: which path, how many programs, outputs allocated."""

import zlib

import torch
import triton
from torch import Tensor

from megatron_lowbit.kernels.norm import (
    WARPS,
    normalize_quantize,
    row_side,
    statistic,
    takes,
    tile_of,
)
from megatron_lowbit.numerics import QuantizedTensor, Request
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm
from megatron_lowbit.parallel.area import Area
from megatron_lowbit.parallel.kernel import (
    COMPACT,
    GATHERED,
    ONE_STAGE,
    all_reduce_norm_kernel,
)
from megatron_lowbit.parallel.meeting import LATE, PROGRAMS

PATHS = {"one-stage": ONE_STAGE.value, "compact": COMPACT.value, "gathered": GATHERED.value}
ONE_STAGE_BYTES = {2: 2**40, 4: 2**18, 8: 2**17}
"""Up to how many bytes of x every rank sums up everything by itself, by ranks."""


def launch(
    area: Area,
    x: Tensor,
    residual: Tensor | None,
    norm: MXNorm | RMSNorm,
    gain: Tensor | None,
    request: Request | None,
    keep_total: bool,
    path: str | None,
    limit: int,
) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
    """One call of the kernel, and of the one after it where a format has a tensor scale.

    Raises:
        ValueError: no such path, or no kernel takes the request.
    """
    if request is not None and not takes(x, norm, request):
        raise ValueError(f"no kernel normalizes and quantizes to {request.quantizer}")
    rows, columns = x.shape
    tensor_scaled = request is not None and request.quantizer.format.tensor_scaled
    total = torch.empty_like(x) if keep_total or tensor_scaled else None
    y = torch.empty_like(x) if request is None else None
    most = torch.zeros((), dtype=torch.int32, device=x.device) if tensor_scaled else None
    side, arguments, made = None, (None, None, None, None), None
    if request is not None and not tensor_scaled:
        side, arguments, made = row_side(request, x, None, False)
    block = 16 if request is None else request.quantizer.format.block
    if path is not None and path not in PATHS:
        raise ValueError(f"path {path!r} is none of {', '.join(PATHS)}")
    chosen = path or choose_path(area.ranks, x.nbytes, side is not None and total is None)
    height, part = tile_of(columns, block)
    p, constant, eps = statistic(norm, block)
    span = 1 if chosen == "one-stage" else area.ranks
    groups = triton.cdiv(triton.cdiv(rows, height), span)
    wanted = (str(request and request.quantizer), total is None, residual is None, gain is None)
    tag = _hash(rows, columns, chosen, x.dtype, p, eps, *wanted)
    all_reduce_norm_kernel[(min(groups, _programs(x.device)),)](
        x, residual, total, rows, columns, gain, constant, eps, y, most, *arguments,
        area.addresses, area.state, area.fault.data_ptr(), area.rank,
        tag, rows << 32 | columns, limit, area.data, area.half,
        area.ranks, triton.next_power_of_2(area.ranks), PATHS[chosen],
        height, part, triton.cdiv(columns, part), block, p, side,
        rows % (height * span) == 0 and columns % part == 0,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    if tensor_scaled:
        amax = most.view(torch.float32)
        made, _ = normalize_quantize(total, norm, request, False, gain, amax)
    return (y if request is None else made), (total if keep_total else None)


def choose_path(ranks: int, size: int, compact: bool) -> str:
    """The fastest path, by measurement, for ``size`` bytes of x.

    ``compact``: the sum itself is not wanted, and codes are.
    """
    most = max((r for r in ONE_STAGE_BYTES if r <= ranks), default=2)
    if size <= ONE_STAGE_BYTES[most]:
        return "one-stage"
    return "compact" if compact else "gathered"


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return min(PROGRAMS.value, 2 * count)


def _hash(*values: object) -> int:
    """31 bits that are the same for the same values on all ranks."""
    return zlib.crc32(repr(values).encode()) & 0x7FFFFFFF


def reason(area: Area) -> str | None:
    """What a kernel has reported, in words; None where all is well."""
    what, who, mine, theirs = area.fault.tolist()
    if not what:
        return None
    if what == LATE.value:
        return f"rank {who} of the group did not come to a call with {_shape(mine)} in time"
    if mine == theirs:
        return f"rank {who} of the group came with another norm, output, path or dtype"
    return (
        f"rank {who} of the group came with {_shape(theirs)}, rank {area.rank} with {_shape(mine)}"
    )


def _shape(word: int) -> str:
    return f"{word >> 32} x {word & 0xFFFFFFFF}"
