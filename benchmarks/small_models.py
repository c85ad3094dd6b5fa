"""Linear layers of one Transformer layer, by width and tokens, with and without CUDA graphs.

    python -m benchmarks small_models

From which width and number of tokens does a recipe pay? The four linear layers of a Llama-like
layer (QKV with half as many groups as heads, gated feed-forward 3.5 times as wide) run forward and
backward one after another. Weights are quantized in each call, as in a graph. Without graphs the
time of a call is the mean of many in a row, the GPU's or the CPU's, whichever takes longer.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import linear, records, runner, timing

WIDTHS = (1024, 2048, 4096, 8192)
TOKENS = (2048, 4096, 8192, 16384)
CONTENDERS = ("BF16", "fp8-tile", "mxfp8", "fp8-delayed", "nvfp4", "mxfp4-backward")
CALLS, TURNS = 8, 5
Call = Callable[[], object]


class Shape(NamedTuple):
    """Width of a model, and tokens of a microbatch."""

    width: int
    tokens: int

    def sizes(self) -> list[linear.Size]:
        """Return the sizes of the layer's linear layers: QKV, projection, two of the MLP."""
        width, wide = self.width, 7 * self.width // 2
        pairs = (width, 2 * width), (width, width), (width, 2 * wide), (wide, width)
        return [linear.Size(self.tokens, *pair) for pair in pairs]


def layer(name: str, shape: Shape) -> Call:
    """Build the linear layers of a contender; return what calls them, forward and backward."""
    parts = []
    for size in shape.sizes():
        options = {"dtype": torch.bfloat16, "device": timing.device()}
        x = torch.randn(size.tokens, size.inputs, **options, requires_grad=True)
        grad = torch.randn(size.tokens, size.outputs, **options)
        parts.append((linear.CONTENDERS[name].make(size), x, grad))

    def call() -> None:
        for built, x, grad in parts:
            torch.autograd.grad(built.forward(x), [x, built.weight], grad)

    return call


def milliseconds(call: Call) -> float:
    """Return the median time of a call, of turns of several in a row."""
    times = [timing.mean_ms(call, CALLS, wait=True) for _ in range(TURNS + 1)]
    return statistics.median(times[1:])


def run(shape: Shape, names: Sequence[str]) -> list[dict]:
    """Measure each contender at one width and number of tokens."""
    rows: list[dict] = []
    for name in names:
        row = {"contender": name, **shape._asdict()}
        try:
            call = layer(name, shape)
            row["ms"] = round(milliseconds(call), 4)
            if torch.cuda.is_available():
                row["graph_ms"] = round(milliseconds(timing.captured(call)), 4)
        except Exception as error:  # of whatever does not take the case, its reason
            row["refused"] = timing.reason(error)
        rows.append(row)
    for key in ("ms", "graph_ms"):
        if all(key in row or "refused" in row for row in rows):
            runner.add_ratios(rows, f"as_fast_as_bf16_{key}", "BF16", key)
    return rows


def table(rows: Sequence[dict]) -> Table:
    """Tabulate the ratios to BF16 without and with graphs, a line for each width and tokens."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    shown = Table("width", "tokens", *names, title="as fast as BF16 without / with CUDA graphs")
    for shape in dict.fromkeys((row["width"], row["tokens"]) for row in rows):
        measured = [row for row in rows if (row["width"], row["tokens"]) == shape]
        cells = [
            f"{row.get('as_fast_as_bf16_ms', '')} / {row.get('as_fast_as_bf16_graph_ms', '')}"
            for row in measured
        ]
        shown.add_row(*map(str, shape), *cells)
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = records.parser(__doc__)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    records.add_output(parser, "small-models")
    args = parser.parse_args(argv)
    begin, rows = time.monotonic(), []
    for width in WIDTHS:
        for tokens in TOKENS:
            rows += run(Shape(width, tokens), args.contenders)
            runner.write(args.output, rows, begin)
    Console(width=150).print(table(rows))
