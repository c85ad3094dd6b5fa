"""Experts' linear layers, forward and backward: recipes, BF16 and Transformer Engine.

    python -m benchmarks experts --sweep

All experts of a layer in one call: 16384 tokens of 8 large experts, or 32768 of 128 small ones,
each with as many tokens as the others, or (``skewed``) the first with half of all and a quarter of
them with none. "BF16" is torch's grouped GEMM, ``torch._grouped_mm``. Transformer Engine ("TE")
multiplies experts one after another, or ("grouped tensors") by cuBLASLt's grouped GEMM, which on
Hopper takes version 13.4 in BF16, 13.5 with current scaling and 13.6 blockwise: LD_PRELOAD may name
a library. Weights are quantized in each call, as with one microbatch per step, or were before
("kept"), as in all but the first of several.
The CPU's time of a call is measured apart, and so is the GPU's by kernel, in the order of a call,
unless there are very many: ``kernels_us`` in the JSON.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import records, runner, timing
from benchmarks.linear import middle_precision
from benchmarks.timing import Ceilings, Step
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import (
    GroupContext,
    LinearContext,
    WeightCache,
    lowbit_grouped_linear,
)  # fmt: skip

BYTES_WRITTEN_BETWEEN = 3 * timing.FLUSH_BYTES
"""Long enough for the CPU to launch the layers of 128 experts meanwhile."""
CALLS = 3
"""Calls whose CPU time is measured together, and which the profiler sees."""
MOST_KERNELS = 40
Forward = Callable[[Tensor], Tensor]


class Size(NamedTuple):
    """Size of a layer's experts, and how tokens are spread: 1 skewed, 0 balanced."""

    experts: int
    tokens: int
    inputs: int
    outputs: int
    skewed: int = 0

    def tokens_per_expert(self) -> list[int]:
        """Return each expert's tokens, multiples of 16."""
        each = self.tokens // self.experts
        if not self.skewed:
            return [each] * self.experts
        idle = self.experts // 4
        rest = self.tokens // 2 // (self.experts - 1 - idle) // 16 * 16
        busy = [rest] * (self.experts - 1 - idle)
        return [self.tokens - sum(busy), *busy, *[0] * idle]

    def __str__(self) -> str:
        spread = "skewed" if self.skewed else "balanced"
        return f"{self.experts} x ({self.inputs} -> {self.outputs}), {self.tokens} tokens, {spread}"


SIZES = [
    Size(8, 16384, 4096, 14336),
    Size(8, 16384, 4096, 14336, 1),
    Size(128, 32768, 2048, 768),
    Size(128, 32768, 2048, 768, 1),
    Size(16, 32768, 2048, 3584),
]


class Built(NamedTuple):
    """A layer: its forward pass and its weights."""

    forward: Forward
    weights: list[Tensor]


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return torch._grouped_mm(x, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        wgrad = torch._grouped_mm(grad.t(), x, ends)
        return torch._grouped_mm(grad, weight, ends), wgrad, None


def _weight(size: Size) -> Tensor:
    shape = size.experts, size.outputs, size.inputs
    return 0.02 * torch.randn(shape, dtype=torch.bfloat16, device=timing.device())


def _torch(size: Size) -> Built:
    weight = _weight(size).requires_grad_()
    ends = torch.tensor(size.tokens_per_expert(), device=weight.device).cumsum(0).to(torch.int32)
    return Built(lambda x: _GroupedMM.apply(x, weight, ends), [weight])


def _recipe(name: str, keeps: bool, size: Size) -> Built:
    precision = middle_precision(name)
    weights = [weight.clone().requires_grad_() for weight in _weight(size).unbind()]
    context = LinearContext(
        precision, select_engine(weights[0].device), key=1,
        weight_cache=WeightCache() if keeps else None,
    )  # fmt: skip
    group = GroupContext(context, [*range(size.experts)] if precision.stochastic else ())
    tokens, nothing = size.tokens_per_expert(), [None] * size.experts
    return Built(lambda x: lowbit_grouped_linear(x, weights, group, tokens, nothing), weights)


def _transformer_engine(recipe: str | None, size: Size, fused: bool = False) -> Built:
    """Build a layer that multiplies experts one after another, or (``fused``) by one GEMM.

    That takes grouped tensors: counts on the GPU, and one weight, since a list of weights would be
    limited to 64 and, where the library has no such GEMM, be multiplied one after another without
    an error.

    Raises:
        ValueError: the GEMM does not take these numbers of tokens.
    """
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as te

    tokens = size.tokens_per_expert()
    if fused and recipe == "Float8BlockScaling" and any(count % 128 for count in tokens):
        # Its kernel would stop with an error of the GPU, which ends all contenders.
        raise ValueError("FP8 blocks take multiples of 128 tokens of each expert")
    os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"  # or one weight becomes many
    layer = te.GroupedLinear(
        size.experts, size.inputs, size.outputs, bias=False, params_dtype=torch.bfloat16,
        single_grouped_weight=fused, use_grouped_tensor=fused,
    )  # fmt: skip
    chosen = recipe and getattr(recipes, recipe)()
    counts = torch.tensor(tokens, device=timing.device()) if fused else tokens

    def forward(x: Tensor) -> Tensor:
        with te.autocast(enabled=True, recipe=chosen) if chosen else nullcontext():
            return layer(x, counts)

    return Built(forward, list(layer.parameters()))


RECIPES = ("fp8-tile", "mxfp8", "nvfp4", "nvfp4-fold", "mxfp4-backward")
CONTENDERS: dict[str, Callable[[Size], Built]] = {
    "BF16": _torch,
    "TE BF16": partial(_transformer_engine, None),
    "TE blockwise": partial(_transformer_engine, "Float8BlockScaling"),
    **{
        f"TE {name}, grouped tensors": partial(_transformer_engine, recipe, fused=True)
        for name, recipe in {
            "BF16": None,
            "current scaling": "Float8CurrentScaling",
            "blockwise": "Float8BlockScaling",
        }.items()
    },
    **{name: partial(_recipe, name, False) for name in RECIPES},
    **{f"{name}, kept": partial(_recipe, name, True) for name in RECIPES},
}


def _step(built: Built, x: Tensor, grad: Tensor) -> Step:
    x = x.detach().requires_grad_()

    def run(mark: timing.Mark) -> None:
        y = built.forward(x)
        mark()
        torch.autograd.grad(y, [x, *built.weights], grad, allow_unused=True)

    return run


def run(size: Size, names: Sequence[str], limits: Ceilings, seconds: float) -> list[dict]:
    """Measure each contender on one size."""
    options = {"dtype": torch.bfloat16, "device": timing.device()}
    x = torch.randn(size.tokens, size.inputs, **options)
    grad = torch.randn(size.tokens, size.outputs, **options)
    steps: dict[str, Step] = {}

    def builder(name: str) -> Step:
        steps[name] = _step(CONTENDERS[name](size), x, grad)
        return steps[name]

    def row(name: str, laps: list[list[float]]) -> dict:
        times = timing.phases(laps)
        return {
            **times["both"],
            "forward_ms": times["forward"]["median_ms"],
            "backward_ms": times["backward"]["median_ms"],
            "tflop_per_s": round(
                6 * size.tokens * size.inputs * size.outputs / times["both"]["median_ms"] / 1e9, 1
            ),
            "cpu_ms": round(_cpu_ms(steps[name]), 3),
            "kernels_us": _kernels(steps[name]),
        }

    builders = {name: partial(builder, name) for name in names}
    rows = runner.rows_of(builders, row, size._asdict(), seconds, flush=BYTES_WRITTEN_BETWEEN)
    runner.add_ratios(rows, "as_fast_as_bf16", "BF16", "median_ms")
    return [row | {"cublaslt": records.cublaslt()} for row in rows]


def _cpu_ms(step: Step) -> float:
    """Return the CPU's time of a call that does not wait for the GPU: the least of some turns."""
    return min(timing.mean_ms(partial(step, lambda: None), CALLS) for _ in range(3))


def _kernels(step: Step) -> list[tuple[str, float]]:
    """Return the GPU's microseconds of each kernel of a call; nothing on a CPU."""
    if timing.device().type == "cpu":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(CALLS):
            step(lambda: None)
        timing.synchronize()
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    return in_order([(event.name, event.device_time) for event in events if event.device_time])


def in_order(kernels: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the medians of the kernels of ``CALLS`` equal calls; nothing if there are too many.

    Args:
        kernels: name and microseconds of all, one call after another.
    """
    each = len(kernels) // CALLS
    calls = [kernels[first : first + each] for first in range(0, CALLS * each, each or 1)]
    if each > MOST_KERNELS:
        return []
    return [
        (same[0][0][:60], round(statistics.median(us for _, us in same), 1))
        for same in zip(*calls, strict=True)
    ]


COLUMNS = {
    key: key
    for key in (
        "median_ms", "forward_ms", "backward_ms", "tflop_per_s", "cpu_ms", "as_fast_as_bf16",
    )
}  # fmt: skip
main = runner.over_sizes("experts", __doc__, CONTENDERS, SIZES, run, COLUMNS)
