"""CPU time of one linear layer's forward and backward, while the GPU has nothing to wait for.

    python -m benchmarks host_time

512 tokens, 512 -> 512 features: kernels end sooner than the CPU launches them, and no operand is
padded. Contenders are the same as in ``linear.py``, in turns; the calls of a turn follow each other
without a synchronization, so that no time on the GPU is counted. Weights are quantized in each
call, as with one microbatch per step.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console

from benchmarks import linear, records, runner, timing
from benchmarks.timing import Step

SIZE = linear.Size(512, 512, 512)
CALLS = 20
"""Calls of a turn: the kernels of all fit the queue of the GPU."""
TURNS = 40
PEERS = {"times_bf16": "BF16", "times_te_bf16": "TE BF16"}


def run(names: Sequence[str], turns: int = TURNS) -> list[dict]:
    """Measure the microseconds of a call of each contender, or say why it refuses."""
    options = {"dtype": torch.bfloat16, "device": timing.device()}
    x = torch.randn(SIZE.tokens, SIZE.inputs, **options, requires_grad=True)
    grad = torch.randn(SIZE.tokens, SIZE.outputs, **options)

    def builder(name: str) -> Step:
        return linear.step(linear.CONTENDERS[name].make(SIZE), x, grad)

    steps, refused = timing.build({name: partial(builder, name) for name in names})
    calls = {name: partial(step, lambda: None) for name, step in steps.items()}
    times = timing.in_turns({n: partial(timing.mean_ms, c, CALLS) for n, c in calls.items()}, turns)
    medians = {name: 1e3 * statistics.median(ms) for name, ms in times.items()}
    rows = []
    for name, ms in times.items():
        row = {"median_us": round(medians[name], 1), "fastest_us": round(1e3 * min(ms), 1)}
        ratios = {key: medians[name] / medians[p] for key, p in PEERS.items() if p in medians}
        ratios = {key: round(ratio, 2) for key, ratio in ratios.items()}
        rows.append({"contender": name, **row, **ratios})
    return rows + [{"contender": name, "refused": why} for name, why in refused.items()]


COLUMNS = {key: key for key in ("median_us", "fastest_us", *PEERS)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = records.parser(__doc__)
    names = [name for name, contender in linear.CONTENDERS.items() if not contender.long]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    records.add_output(parser, "host-time")
    args = parser.parse_args(argv)
    begin, rows = time.monotonic(), run(args.contenders)
    Console(width=150).print(runner.table(rows, f"CPU time of a call, {SIZE}", COLUMNS))
    runner.write(args.output, rows, begin)
