"""CPU time of one linear layer's forward and backward, while the GPU has nothing to wait for.

    python benchmarks/host_time.py

512 tokens, 512 -> 512 features: kernels end sooner than the CPU launches them, and no operand is
padded. Contenders are those
of ``linear.py``, in turns; the calls of a turn follow each other without a synchronization, so that
no time on the GPU is counted. Weights are quantized in each call, as with one microbatch a step.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial

import linear
import timing
import torch
from rich.console import Console
from rich.table import Table
from timing import Step

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
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(turns):
        for name, step in order.sample(list(steps.items()), len(steps)):
            times[name].append(_microseconds(step))
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows = [
        {
            "contender": name,
            "median_us": round(medians[name], 1),
            "fastest_us": round(min(found), 1),
        }
        | {key: round(medians[name] / medians[p], 2) for key, p in PEERS.items() if p in medians}
        for name, found in times.items()
    ]
    return rows + [{"contender": name, "refused": why} for name, why in refused.items()]


def _microseconds(step: Step) -> float:
    """Time a turn on an idle GPU; return microseconds a call."""
    timing.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        step(lambda: None)
    return 1e6 * (time.perf_counter() - begin) / CALLS


def table(rows: Sequence[dict]) -> Table:
    """Tabulate microseconds and ratios."""
    shown = Table(title=f"CPU time of a call, {SIZE}")
    for heading in ("contender", "median us", "fastest us", "x BF16", "x TE BF16"):
        shown.add_column(heading)
    for row in rows:
        keys = ("refused",) if "refused" in row else ("median_us", "fastest_us", *PEERS)
        shown.add_row(row["contender"], *(str(row.get(key, "")) for key in keys))
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, contender in linear.CONTENDERS.items() if not contender.long]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    timing.add_output(parser, "host-time")
    args = parser.parse_args(argv)
    begin, rows = time.monotonic(), run(args.contenders)
    Console(width=150).print(table(rows))
    timing.write(args.output, None, rows, begin)


if __name__ == "__main__":
    main()
