"""MXNorm and the cast against RMSNorm and the cast: kernels, and layers of Llama-3-8B.

    python -m benchmarks mxnorm              measure, write the JSON, print its means
    python -m benchmarks mxnorm --summary    print the means of a JSON

As in appendix H of "MXNorm" (arXiv 2603.13180), on its grid: tokens 2**12 to 2**16; hidden sizes
2**10 to 2**14 and three between each two; blocks of 16, 32 and 64; E4M3 and E2M1 elements with E8M0
scales, and NVFP4. Gains are in the weights, as MXNorm has them, so that neither kernel
multiplies by them. Both are this project's one kernel (``kernels/norm.py``) and differ in the
statistic only; the same by torch.compile from the reference's cast at powers of two. Backward: the
norm's own gradient, by one kernel (``kernels/norm.py``), by torch's operations one after
another, and by torch.compile, each in a CUDA graph, with the time that its bytes take at a copy's
rate. Layers: forward without gradients, 4 or 8 sequences, quantized weights cached, as within a
step. A file that is there keeps the parts that are not measured again.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import records, runner, timing
from benchmarks.model import MODEL, build, initialize
from benchmarks.quantize import stored_bytes
from benchmarks.timing import Ceilings, Step
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.numerics import FORMATS, Quantizer, Request
from megatron_lowbit.numerics.block_formats.mx import MX
from megatron_lowbit.numerics.formats import E2M1, E4M3
from megatron_lowbit.numerics.mxnorm import MXNorm, absmax_constant
from megatron_lowbit.numerics.rmsnorm import RMSNorm

TOKENS = [2**r for r in range(12, 17)]
HIDDEN = [k * 2**r // 4 for r in range(10, 14) for k in (4, 5, 6, 7)] + [2**14]
ELEMENTS = {"E4M3": E4M3, "E2M1": E2M1}
CASES = {f"{name}, B = {b}": (name, b) for name in ELEMENTS for b in (16, 32, 64)}
COMPILED = ("E4M3, B = 32", "E2M1, B = 16")
NORMS = {"MXNorm": MXNorm(), "RMSNorm": RMSNorm()}
REPETITIONS, SECONDS, FLUSH_BYTES = 15, 0.02, 2**31
PARTS = ("kernel", "backward", "layer")
GRADIENT = "norm_grad"
"""The case of the part ``backward``."""
RECIPES = ("mxfp8", "nvfp4")
LAYERS = 4
BATCHES = (4, 8)


def _format(case: str) -> Any:
    if case == "NVFP4":
        return FORMATS["nvfp4"]
    name, block = CASES[case]
    return MX(case, ELEMENTS[name], 1, block=block)


def _kernel(case: str, norm: str, x: Tensor) -> Callable[[], Any]:
    from megatron_lowbit.kernels.norm import normalize_quantize

    request = Request(Quantizer(_format(case)))
    return partial(normalize_quantize, x, NORMS[norm], request, Form.CODES)


@cache
def _compiled(case: str, norm: str) -> Callable[[Tensor], Any]:
    format, eps = _format(case), NORMS[norm].eps
    factor = absmax_constant(2.0, format.block)

    def normalize(x: Tensor) -> Tensor:
        if norm == "RMSNorm":
            return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        absmax = x.unflatten(-1, (-1, format.block)).abs().amax(-1)
        return x * (factor / (absmax.square().mean(-1, keepdim=True).sqrt() + eps))

    @torch.compile
    def compiled(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales, _ = format.encode(normalize(x.float()), x, None)
        if format.element.bits == 4:
            codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return codes, scales

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.maybe_mark_dynamic(x, 0)  # compiled for a hidden size, for any tokens
        return compiled(x)

    return run


def _rows(builders: dict[str, Callable[[], Step]], head: dict, row: Callable) -> list[dict]:
    options = {"flush": FLUSH_BYTES, "most": REPETITIONS}
    return runner.rows_of(builders, row, head, SECONDS, **options)


def _of_copy(moved: int, times: dict, limits: Ceilings) -> float:
    return round(moved / times["median_ms"] * 1e3 / limits.copy, 3)


def kernel_rows(tokens: int, hidden: int, case: str, limits: Ceilings) -> list[dict]:
    """Time one cell of the grid, and count its bytes."""
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=timing.device())
    makers = {norm: partial(_kernel, case, norm, x) for norm in NORMS}
    if case in COMPILED and hidden & (hidden - 1) == 0:
        for norm in NORMS:
            makers[f"{norm}, compiled"] = lambda norm=norm: partial(_compiled(case, norm), x)
    moved: dict[str, int] = {}

    def builder(name: str) -> Step:
        run = makers[name]()
        moved[name] = x.nbytes + stored_bytes(run())
        return lambda mark: run()

    def row(name: str, laps: list[list[float]]) -> dict:
        times = timing.spread(map(sum, laps))
        return {**times, "bytes": moved[name], "of_copy": _of_copy(moved[name], times, limits)}

    head = {"part": "kernel", "case": case, "tokens": tokens, "hidden": hidden}
    return _rows({name: partial(builder, name) for name in makers}, head, row)


def _gradient(grad: Tensor, x: Tensor, rho: Tensor) -> Tensor:
    """Compute the norm's backward pass by torch: each operation moves the whole matrix."""
    g, values = grad.float(), x.float()
    along = (g * values).sum(-1, keepdim=True) / x.shape[-1]
    return (rho * g - rho**3 * along * values).to(x.dtype)


@cache
def _compiled_gradient(hidden: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    compiled = torch.compile(_gradient)

    def run(*tensors: Tensor) -> Tensor:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*tensors)

    return run


def gradients(hidden: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return the norm's backward pass of rows of a length, by contenders."""
    from megatron_lowbit.kernels.norm import norm_grad

    return {"kernel": norm_grad, "torch": _gradient, "torch.compile": _compiled_gradient(hidden)}


def backward_rows(tokens: int, hidden: int, limits: Ceilings) -> list[dict]:
    """Time the norm's backward pass, and count its bytes at a copy's rate."""
    grad, x = torch.randn(2, tokens, hidden, dtype=torch.bfloat16, device=timing.device()).unbind()
    rho = torch.rand(tokens, 1, device=x.device) + 0.5
    moved = grad.nbytes + 2 * x.nbytes + rho.nbytes
    runs = {name: partial(run, grad, x, rho) for name, run in gradients(hidden).items()}

    def row(name: str, laps: list[list[float]]) -> dict:
        times = timing.spread(map(sum, laps))
        expected = round(1e3 * moved / limits.copy, 4)
        of_copy = _of_copy(moved, times, limits)
        return {**times, "bytes": moved, "expected_ms": expected, "of_copy": of_copy}

    head = {"part": "backward", "case": GRADIENT, "tokens": tokens, "hidden": hidden}
    return _rows({name: partial(_captured, run) for name, run in runs.items()}, head, row)


def _captured(run: Callable[[], Any]) -> Step:
    """Return a step that replays a CUDA graph of ``run``, or runs it without a GPU."""
    call = timing.captured(run) if torch.cuda.is_available() else run
    return lambda mark: call()


def layer_rows(recipe: str) -> Iterator[dict]:
    """Time a layer under a recipe, with either norm."""
    from megatron_lowbit.megatron.pretrain import teardown

    with teardown():
        models = {norm: _model(recipe, norm) for norm in NORMS}
        for batch in BATCHES:
            for tokens in TOKENS:
                steps = {name: _layers(m, batch, tokens // batch) for name, m in models.items()}
                laps = timing.measure(steps, SECONDS, flush=0, most=REPETITIONS)
                for norm in steps:
                    times = timing.spread(sum(lap) / LAYERS for lap in laps[norm])
                    head = {"part": "layer", "case": recipe, "tokens": tokens, "batch": batch}
                    yield head | {"contender": norm} | times


def _model(recipe: str, norm: str) -> nn.Module:
    from megatron_lowbit.arguments import parse_arguments

    # isort: split
    from megatron.training.global_vars import unset_global_variables

    more = ["--num-layers", str(LAYERS), "--normalization", norm, "--precision-recipe", recipe]
    more += ["--transformer-impl", "local"]
    if recipe == "nvfp4":
        more += ["--recipe-set", "bf16_blocks=none"]
    unset_global_variables()  # the other model's
    args = parse_arguments([*MODEL, *more])
    if not torch.distributed.is_initialized():
        initialize(args)
    model = build(args)
    return model.module if args.bf16 else model


def _layers(model: nn.Module, batch: int, length: int) -> Step:
    dtype = next(model.parameters()).dtype
    x = torch.randn(length, batch, model.config.hidden_size, dtype=dtype, device=timing.device())
    rotary = model.rotary_pos_emb(length)

    def step(mark: timing.Mark) -> None:
        hidden = x
        for layer in model.decoder.layers:
            hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=rotary)

    step(lambda: None)  # with gradients: quantizes the weights and keeps them
    return torch.no_grad()(step)


def measure(limits: Ceilings, parts: Sequence[str]) -> Iterator[list[dict]]:
    """Yield all rows, the kernels' first, case by case."""
    for case in (*CASES, "NVFP4") if "kernel" in parts else ():
        rows = []
        for hidden in HIDDEN:
            for tokens in TOKENS:
                rows += kernel_rows(tokens, hidden, case, limits)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        yield rows
    for hidden in HIDDEN[::4] if "backward" in parts else ():
        yield [row for tokens in TOKENS for row in backward_rows(tokens, hidden, limits)]
    if "layer" in parts:
        # megatron-core would use Transformer Engine's rope where it finds it.
        sys.modules["transformer_engine"] = None
        for recipe in RECIPES:
            yield list(layer_rows(recipe))


def speedups(rows: Sequence[dict], part: str, case: str, name: str, base: str) -> dict:
    """Return a contender's speed relative to ``base``, by cell."""
    keys = ("batch", "tokens") if part == "layer" else ("hidden", "tokens")
    cells: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if (row["part"], row["case"]) == (part, case) and "refused" not in row:
            cell = cells.setdefault(tuple(row[key] for key in keys), {})
            cell[row["contender"]] = row["median_ms"]
    both = {cell: times for cell, times in cells.items() if {name, base} <= times.keys()}
    return {cell: times[base] / times[name] for cell, times in both.items()}


PAIRS = (
    ("MXNorm", "RMSNorm"), ("MXNorm", "RMSNorm, compiled"),
    ("MXNorm, compiled", "RMSNorm, compiled"), ("kernel", "torch"), ("kernel", "torch.compile"),
)  # fmt: skip
"""Contenders that are compared, and with which."""


def summary(rows: Sequence[dict]) -> Table:
    """Return geometric means over the grid, with the least and the largest."""
    shown = Table("", "over", "cells", "geometric mean", "least", "largest", "of a copy")
    for part, case in dict.fromkeys((row["part"], row["case"]) for row in rows):
        for name, base in PAIRS:
            if not (ratios := speedups(rows, part, case, name, base)):
                continue
            values = list(ratios.values())
            largest = (part, case, name, 4096, TOKENS[-1])
            keys = ("part", "case", "contender", "hidden", "tokens")
            rates = [row["of_copy"] for row in rows
                     if tuple(map(row.get, keys)) == largest and "of_copy" in row]  # fmt: skip
            mean = statistics.geometric_mean(values)
            figures = [f"{v:.3f}" for v in (mean, min(values), max(values), *rates)]
            shown.add_row(f"{part}, {case}: {name}", base, str(len(values)), *figures)
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    """Measure or read, print the means, write the JSON."""
    parser = records.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--summary", action="store_true", help="summarize the results in --output")
    records.add_output(parser, "mxnorm")
    args = parser.parse_args(argv)
    rows = records.read(args.output)
    if not args.summary:
        rows = [r for r in rows if r["part"] not in args.parts]
        begin, limits = time.monotonic(), timing.ceilings()
        for more in measure(limits, args.parts):
            rows += more
            runner.write(args.output, rows, begin, limits)
    Console(width=130).print(summary(rows))
