"""Times of contenders taken in turns, and the ceilings they are set against.

A contender is a step: a function that does the work once and calls ``mark()`` between its phases.
On a GPU phases are timed by CUDA events, with the second-level cache flushed before every step;
elsewhere by the CPU's clock, which is for trying the scripts out.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.records import ROOT
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.numerics import FORMATS, Quantizer, Request

Mark = Callable[[], None]
Step = Callable[[Mark], None]

TURNS = 10
WARMUP = 3
MOST = 200
# Far above the cache, and some 2 ms long, so that the CPU has launched the step before the GPU is
# done: what is timed is the GPU's work, as in training, where launches run ahead.
FLUSH_BYTES = 2**33


def device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _moments(step: Step, flush: Tensor | None) -> list:
    """Run a step; return when it began, its marks and its end, on the time line of a GPU if any."""
    moments: list = []

    def mark() -> None:
        if torch.cuda.is_available():
            moments.append(torch.cuda.Event(enable_timing=True))
            moments[-1].record()
        else:
            moments.append(time.perf_counter())

    if flush is not None:
        flush.zero_()
    mark()
    step(mark)
    mark()
    return moments


def _laps(moments: list) -> list[float]:
    """Return milliseconds between moments; synchronize before."""
    if torch.cuda.is_available():
        return [begin.elapsed_time(end) for begin, end in pairwise(moments)]
    return [1e3 * (end - begin) for begin, end in pairwise(moments)]


def measure(
    steps: dict[str, Step], seconds: float = 0.15, flush: int = FLUSH_BYTES, most: int = MOST
) -> dict[str, list[list[float]]]:
    """Time every repetition of every step; return the laps in ms.

    Each step is repeated for about ``seconds`` after its warm-up, ``most`` times at most, spread
    over turns in which all contenders come one after another, in another order each time: clocks
    and temperature drift alike for all, and none always follows the hottest. ``flush`` bytes are
    written before each repetition.
    """
    cold = None
    if flush and torch.cuda.is_available():
        cold = torch.empty(flush, dtype=torch.uint8, device="cuda")
    counts = {name: min(most, _repetitions(step, seconds, cold)) for name, step in steps.items()}
    laps: dict[str, list[list[float]]] = {name: [] for name in steps}
    order = random.Random(0)
    for turn in range(TURNS):
        for name, step in order.sample(list(steps.items()), len(steps)):
            share = counts[name] * (turn + 1) // TURNS - counts[name] * turn // TURNS
            repetitions = [_moments(step, cold) for _ in range(share)]
            synchronize()
            laps[name] += map(_laps, repetitions)
    return laps


def _repetitions(step: Step, seconds: float, cold: Tensor | None) -> int:
    for _ in range(WARMUP):
        last = _moments(step, cold)
        synchronize()
    return max(3, math.ceil(1e3 * seconds / max(sum(_laps(last)), 1e-3)))


def spread(milliseconds: Iterable[float]) -> dict[str, float]:
    """Return median and interquartile range of repetitions."""
    values = list(milliseconds)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median_ms": round(middle, 4),
        "iqr_ms": round(high - low, 4),
        "repetitions": len(values),
    }


def phases(laps: list[list[float]]) -> dict[str, dict[str, float]]:
    """Return the times of forward and backward, which a step's one mark divides, and of both."""
    parts = dict(zip(("forward", "backward"), zip(*laps, strict=True), strict=True))
    return {name: spread(lap) for name, lap in (parts | {"both": map(sum, laps)}).items()}


def mean_ms(call: Callable[[], object], calls: int, wait: bool = False) -> float:
    """Time calls in a row on an idle GPU: the CPU's time of one, with ``wait`` also the GPU's."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if wait:
        synchronize()
    return 1e3 * (time.perf_counter() - begin) / calls


def in_turns(steps: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Return the results of each step in each turn; turns have different orders."""
    values: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(turns):
        for name, step in order.sample(list(steps.items()), len(steps)):
            values[name].append(step())
    return values


def captured(call: Callable[[], object], calls: int = 1) -> Callable[[], object]:
    """Return the replay of a CUDA graph of so many calls; the first one is made outside of it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    return graph.replay


def build(builders: dict[str, Callable[[], Step]]) -> tuple[dict[str, Step], dict[str, str]]:
    """Return the steps that run once, and of the others why they do not."""
    steps, refused = {}, {}
    for name, builder in builders.items():
        # Whatever is raised where a contender is absent or does not take the case is its reason.
        try:
            step = builder()
            step(lambda: None)
            synchronize()
        except Exception as error:
            refused[name] = reason(error)
        else:
            steps[name] = step
    return steps, refused


def reason(error: Exception) -> str:
    """Describe why something refuses, in one line that names no folder of this machine."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".replace(f"{ROOT}/", "")
    return text if len(text) <= 200 else text[:197] + "..."


class Ceilings(NamedTuple):
    """Measure what the device reaches: bytes/s of a copy, FLOP/s of GEMMs.

    ``refused`` names the GEMMs that the device lacks, with the reason.
    """

    copy: float
    gemms: dict[str, float]
    refused: dict[str, str]

    def seconds(self, flops: float, gemm: str) -> float | None:
        """Return the least time of so many operations in a kind of GEMM; None if it is absent."""
        return flops / self.gemms[gemm] if gemm in self.gemms else None

    def as_json(self) -> dict:
        """Return in TB/s and TFLOP/s."""
        gemms = {name: round(rate / 1e12, 4) for name, rate in self.gemms.items()}
        copy = round(self.copy / 1e12, 4)
        return {"copy_tb_per_s": copy, "gemm_tflop_per_s": gemms, "refused": self.refused}


def ceilings() -> Ceilings:
    """Measure the device: a copy of 1 GiB, and products of two 8192 x 8192 matrices."""
    size, bytes_copied = (8192, 2**30) if torch.cuda.is_available() else (256, 2**20)
    builders = {name: partial(builder, size) for name, builder in _GEMMS.items()}
    builders = {"copy": partial(_copy, bytes_copied), **builders}
    steps, refused = build(builders)
    medians = {
        name: statistics.median(sum(lap) for lap in laps) / 1e3
        for name, laps in measure(steps).items()
    }
    rates = {name: 2 * size**3 / seconds for name, seconds in medians.items() if name != "copy"}
    return Ceilings(2 * bytes_copied / medians["copy"], rates, refused)


def _copy(size: int) -> Step:
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device()).unbind()
    return lambda mark: target.copy_(source)


def _bf16_gemm(size: int) -> Step:
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device()).unbind()
    return lambda mark: torch.mm(a, b.t())


def _fp8_operands(size: int) -> tuple[Tensor, Tensor]:
    """Return row-major times column-major, as the GEMMs take them; E4M3 values of N(0, 1)."""
    a, b = (torch.randn(size, size, device=device()).to(torch.float8_e4m3fn) for _ in range(2))
    return a, b.t()


def _tile_gemm(size: int, rhs_rows: int) -> Step:
    """Return lhs in 1x128 tiles, rhs in 1x128 or 128x128 tiles, FP32 sums promoted every 128."""
    a, b = _fp8_operands(size)
    blocks = size // 128
    # Both layouts are the library's own: outer blocks stored last, 128x128 padded to fours along K.
    scale_a = torch.ones(blocks, size, device=a.device).t()
    scale_b, rhs_scaling = scale_a, F.ScalingType.BlockWise1x128
    if rhs_rows == 128:
        scale_b = torch.ones(blocks, -(-blocks // 4) * 4, device=a.device).t()
        rhs_scaling = F.ScalingType.BlockWise128x128
    lhs_kind = F.ScalingType.BlockWise1x128
    return lambda mark: F.scaled_mm(a, b, scale_a, lhs_kind, scale_b, rhs_scaling)


def _block_gemm(size: int) -> Step:
    """Return a GEMM of BF16 operands with block scales, FP32 sums promoted every 128 products."""
    engine, quantizer = select_engine(device()), Quantizer(FORMATS["tetrajet2"])
    format = quantizer.format
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device()).unbind()
    lhs, _ = engine.quantize(a, Request(quantizer, partner=format, left=True), None)
    rhs, _ = engine.quantize(b, Request(quantizer, partner=format), None)
    return lambda mark: engine.gemm(lhs, rhs)


def _scaled_gemm(size: int, scales: int) -> Step:
    """Return one scale for each row of the operands, or (``scales`` 1) for each tensor."""
    a, b = _fp8_operands(size)
    scale_a = torch.ones(scales, 1, device=a.device)
    scale_b = scale_a.t().contiguous()
    if scales == 1:
        scale_a = scale_b = torch.ones((), device=a.device)
    return lambda mark: torch._scaled_mm(
        a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


_GEMMS: dict[str, Callable[[int], Step]] = {
    "bf16": _bf16_gemm,
    "fp8 1x128 . 128x128": lambda size: _tile_gemm(size, 128),
    "fp8 1x128 . 1x128": lambda size: _tile_gemm(size, 1),
    "bf16 1x128 . 1x128": _block_gemm,
    "fp8 per row": lambda size: _scaled_gemm(size, size),
    "fp8 per tensor": lambda size: _scaled_gemm(size, 1),
}
