"""All-reduce, residual, RMSNorm and cast to FP8 as one kernel, against libraries and a kernel.

    torchrun --nproc-per-node 2 -m benchmarks all_reduce_norm
    python -m benchmarks all_reduce_norm --summary benchmarks/results/all_reduce_norm-2xh200.json

x and the residual in BF16, codes in 1x128 tiles of E4M3, the new residual is kept. Peers: NCCL's
all-reduce, and the better of torch's symmetric-memory all-reduces on an x that is in such memory
already, each with one kernel that adds, normalizes and casts. Every contender is captured in a CUDA
graph of many calls, so that the CPU's launches are not what is timed; times are of the slower rank.
The bound: what a rank must be sent by others at the rate of reading a peer's memory, or what it
moves in its own memory at the rate of a copy, whichever takes longer.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import records, runner, timing
from megatron_lowbit.collectives.all_reduce_norm import AllReduceNorm
from megatron_lowbit.kernels.elements import as_dtype
from megatron_lowbit.kernels.norm import (
    WARPS,
    finish_rows,
    load_gain,
    row_side,
    statistic,
    tile_of,
)  # fmt: skip
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.tiles import load_tile, store_tile
from megatron_lowbit.numerics import FORMATS, Quantizer, Request
from megatron_lowbit.numerics.rmsnorm import RMSNorm

HIDDEN = (4096, 8192)
MOST_BYTES = 2**27
CALLS, REPLAYS, LEAD_CYCLES, COPY_BYTES = 40, 11, 500_000, 2**28
NORM, REQUEST = RMSNorm(), Request(Quantizer(FORMATS["fp8-1x128-e4m3"]), needs_codes=True)
PATHS = ("one-stage", "gathered")
OURS, NCCL, SYMMETRIC = "fused", "NCCL + kernel", "symmetric memory + kernel"
WITH_ROWS = "fused, rows kept"


@triton.jit(do_not_specialize=["constant", "eps"])
def add_norm_kernel(
    x, residual, total, R, C, gain, constant, eps, amax, codes, scales, tensor_scale,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Run the peers' second half: residual, norm and cast of rows that are summed up."""
    row0, col0 = tl.program_id(0) * TM, tl.program_id(1) * TN
    parts = ()
    for i in tl.static_range(PARTS):
        at = col0 + i * TN
        part = load_tile(x, C, 1, row0, at, R, C, TM, TN, EVEN)
        part += load_tile(residual, C, 1, row0, at, R, C, TM, TN, EVEN)
        part = as_dtype(part, x.dtype.element_ty)
        store_tile(total, part, row0, at, R, C, EVEN)
        parts = parts + (part,)  # noqa: RUF005  Triton takes no starred tuples
    gains = load_gain(gain, col0, C, TN, PARTS)
    finish_rows(parts, row0, col0, R, C, gain, gains, constant, eps, None, None, None, amax, codes,
                scales, tensor_scale, x.dtype.element_ty, TM, TN, PARTS, BLOCK, P, S,
                EVEN)  # fmt: skip


def add_norm(x: Tensor, residual: Tensor, gain: Tensor) -> None:
    """Run residual, RMSNorm and cast in one kernel, into new tensors."""
    rows, columns = x.shape
    side, arguments, _ = row_side(REQUEST, x, None, Form.CODES)
    block = REQUEST.quantizer.format.block
    height, part = tile_of(columns, block)
    p, constant, eps = statistic(NORM, block)
    add_norm_kernel[(triton.cdiv(rows, height),)](
        x, residual, torch.empty_like(x), rows, columns, gain, constant, eps, *arguments,
        height, part, triton.cdiv(columns, part), block, p, side,
        rows % height == 0 and columns % part == 0, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


class Case(NamedTuple):
    """Tensors of one size."""

    x: Tensor
    residual: Tensor
    gain: Tensor


def contenders(
    run: AllReduceNorm, group: dist.ProcessGroup, case: Case
) -> dict[str, Callable[[], object]]:
    """Return the functions that are timed."""
    x, residual, gain = case
    calls = {
        f"{OURS}, {path}": lambda path=path: run(x, residual, NORM, gain, REQUEST, path=path)
        for path in PATHS
    }
    calls[OURS] = lambda: run(x, residual, NORM, gain, REQUEST)
    # As in training: wgrad quantizes the rows along the other axis.
    calls[WITH_ROWS] = lambda: run(x, residual, NORM, gain, REQUEST, keep_normalized=True)

    def nccl() -> None:
        dist.all_reduce(x, group=group)
        add_norm(x, residual, gain)

    calls[NCCL] = nccl
    return calls | _symmetric(group, case)


def _symmetric(group: dist.ProcessGroup, case: Case) -> dict[str, Callable[[], object]]:
    import torch.distributed._symmetric_memory as symmetric_memory

    x = symmetric_memory.empty(case.x.shape, dtype=case.x.dtype, device=case.x.device)
    x.copy_(case.x)
    symmetric_memory.rendezvous(x, group)

    def reduce_and_norm(all_reduce: Callable) -> None:
        add_norm(all_reduce(x, "sum", group.group_name), case.residual, case.gain)

    operations = {
        "one-shot": torch.ops.symm_mem.one_shot_all_reduce,
        "two-shot": torch.ops.symm_mem.two_shot_all_reduce_,
    }
    return {f"{SYMMETRIC}, {name}": partial(reduce_and_norm, f) for name, f in operations.items()}


def measure(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Time each call in microseconds, the slower rank's median, by graphs of many."""
    replays = {name: timing.captured(call, CALLS) for name, call in calls.items()}
    token = torch.zeros(1, device=device)

    def timed(replay: Callable[[], object]) -> float:
        # The CPU gets ahead, and all GPUs begin together.
        torch.cuda._sleep(LEAD_CYCLES)
        dist.all_reduce(token)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end) / CALLS

    for replay in replays.values():
        replay()
    torch.cuda.synchronize()
    steps = {name: partial(timed, replay) for name, replay in replays.items()}
    times = timing.in_turns(steps, REPLAYS)
    mine = torch.tensor([statistics.median(times[name]) for name in calls], device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return dict(zip(calls, mine.tolist(), strict=True))


def peer_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """Measure the bytes/s of reading a peer's memory, by a copy."""
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    other = handle.get_buffer((group.rank() + 1) % group.size(), (COPY_BYTES,), torch.uint8)
    target = torch.empty_like(other, device=device)
    return 1e6 * COPY_BYTES / measure({"copy": lambda: target.copy_(other)}, device)["copy"]


def bound_us(
    rows: int, hidden: int, ranks: int, link: float, copy: float, rows_kept: bool = False
) -> float:
    """Return the least time: a rank gets its share of x and the others' sums, or all of x."""
    size = 2 * rows * hidden
    remote = size * min(ranks - 1, 2 * (ranks - 1) / ranks)
    # x to be sent, what is sent written and read, x, the residuals, codes and scales, kept rows.
    local = 3 * size + 3 * size + size / 2 + rows * hidden / 32 + size * rows_kept
    return 1e6 * max(remote / link, local / copy)


def rows_of(
    run: AllReduceNorm, group: dist.ProcessGroup, link: float, copy: float
) -> Iterator[dict]:
    """Return a row for each size and contender."""
    device = torch.device("cuda", torch.cuda.current_device())
    for hidden in HIDDEN:
        for power in range(15):
            rows = 2**power
            if 2 * rows * hidden > MOST_BYTES:
                continue
            # x is all-reduced in place again and again, and so is zero.
            x, residual = torch.zeros(2, rows, hidden, dtype=torch.bfloat16, device=device).unbind()
            residual += torch.randn_like(residual)
            case = Case(x, residual, torch.ones(hidden, dtype=torch.bfloat16, device=device))
            for name, us in measure(contenders(run, group, case), device).items():
                kept = name == WITH_ROWS
                least = bound_us(rows, hidden, group.size(), link, copy, kept)
                head = {"rows": rows, "hidden": hidden, "bytes": x.nbytes, "contender": name}
                yield head | {"us": round(us, 2), "bound_us": round(least, 2)}


def best(rows: Sequence[dict], name: str) -> dict[tuple[int, int], float]:
    """Return the least time of the contenders so named, by hidden size and rows."""
    times: dict[tuple[int, int], float] = {}
    for row in rows:
        if row["contender"].startswith(name):
            cell = (row["hidden"], row["rows"])
            times[cell] = min(times.get(cell, row["us"]), row["us"])
    return times


def summary(rows: Sequence[dict]) -> Table:
    """Tabulate times by size, and how many times as fast as each peer."""
    shown = Table("hidden", "rows", "KiB", "fused us", "bound us", "x NCCL", "x symmetric memory")
    ours = {(r["hidden"], r["rows"]): r for r in rows if r["contender"] == OURS}
    peers = [best(rows, name) for name in (NCCL, SYMMETRIC)]
    for (hidden, count), row in ours.items():
        ratios = [f"{peer[hidden, count] / row['us']:.2f}" for peer in peers]
        size = f"{row['bytes'] / 1024:g}"
        shown.add_row(str(hidden), str(count), size, str(row["us"]), str(row["bound_us"]), *ratios)
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on all ranks and write the JSON, or summarize one."""
    parser = records.parser(__doc__)
    parser.add_argument(
        "--summary", type=Path, metavar="FILE.json", help="summarize the results of another run"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    console = Console(width=120)
    if args.summary is not None:
        console.print(summary(records.read(args.summary)))
        return
    begin = time.monotonic()
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = dist.group.WORLD
    limits = timing.ceilings()
    link = peer_rate(group, device)
    run = AllReduceNorm(group, 2 * MOST_BYTES)  # for all paths
    rows = list(rows_of(run, group, link, limits.copy))
    run.check()
    if dist.get_rank() == 0:
        name = f"all_reduce_norm-{group.size()}x{records.gpu_slug()}.json"
        output = args.output or records.RESULTS / name
        more = {"ranks": group.size(), "peer_read_gb_per_s": round(link / 1e9, 1)}
        runner.write(output, rows, begin, limits, choice=run.choice, **more)
        console.print(summary(rows))
    dist.destroy_process_group()
