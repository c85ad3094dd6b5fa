"""Memory and gathered bytes of whole training steps, with weights in BF16 and stored as codes.

    python -m benchmarks stored_weights --output benchmarks/results/stored_weights-2xh100.json

A row of cases/stored_weights.yaml is a run of its own: ``pretrain_gpt.py``'s, on as many
data-parallel ranks as ``--gpus``, with the distributed optimizer and Transformer Engine layers.
Memory is the most that torch has allocated, and reserved, from a step's first forward pass to the
next step's, on each rank; gathered bytes are what a rank receives of parameters in that time, by
the sizes of its collectives. Two steps come before. Arguments after ``--`` go to the training
script. The output gets the rows that it lacks. On CPUs (``--cpu``) it is for trying the script out,
without memory.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import training_steps
from benchmarks.training_steps import cases_file, run_cases, train

WARMUP, COUNTED = 2, 5
"""Steps before those that count (compilation, moments, the first gather), and their number."""
DECLARED = cases_file("stored_weights")
MODELS, COMMON = DECLARED["models"], DECLARED["common"]
ROWS = {
    row: " ".join(["--precision-recipe", recipe, *map(DECLARED["options"].get, options)])
    for row in DECLARED["rows"]
    for recipe, *options in [row.split(", ")]
}
"""Arguments of each row."""


class Watch:
    """Measurements of the steps of this rank, each from its first forward pass to the next."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.received: Counter[str] = Counter()
        self._begun: float | None = None
        self._number = 0
        self._forward = 0

    def begin_step(self, iteration: int, training: bool) -> None:
        """Keep what the last step took, and begin another."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._begun is not None and self._number > WARMUP:
            self.steps.append(
                {
                    "ms": 1e3 * (now - self._begun),
                    "allocated": torch.cuda.max_memory_allocated(),
                    "reserved": torch.cuda.max_memory_reserved(),
                    "allocated_before": self._before,
                    "allocated_by_layers": self._forward - self._before,
                    "received": self.received["received"],
                }
            )
        self._begun, self._before = now, torch.cuda.memory_allocated()
        self._number += 1
        self.received.clear()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def end_layers(self, *_: Any) -> None:
        """Record what the layers keep, before the output layer computes logits."""
        self._forward = torch.cuda.memory_allocated()


def count_received(counts: Counter[str]) -> None:
    """Count the bytes of parameters that this rank receives from now on.

    Those are Megatron-LM's gathers, and the broadcasts of stored weights.
    """
    from megatron.core.distributed import param_and_grad_buffer

    broadcast, gather = dist.broadcast, param_and_grad_buffer.dist_all_gather_func

    def counted_broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        source = kwargs.get("group_src")
        if source is not None and source != dist.get_rank(kwargs["group"]):
            counts["received"] += tensor.nbytes
        return broadcast(tensor, *args, **kwargs)

    def counted_gather(
        gathered: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        counts["received"] += gathered.nbytes - shard.nbytes
        return gather(gathered, shard, *args, **kwargs)

    dist.broadcast = counted_broadcast
    param_and_grad_buffer.dist_all_gather_func = counted_gather


def train_rank(folder: Path, words: list[str]) -> None:
    """Train as one rank; write its steps to ``folder``/RANK.json."""
    import megatron_lowbit.megatron  # noqa: F401  before megatron
    from megatron_lowbit.arguments import parse_arguments
    from megatron_lowbit.arguments.upstream import command_line
    from megatron_lowbit.megatron import pretrain

    watch = Watch()
    count_received(watch.received)
    args = parse_arguments(words, False)
    with pretrain.teardown(), command_line(args.upstream_command_line):
        pretrain.run(args, [partial(_watch_chunks, args, watch)])
    path = folder / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(watch.steps))


def _watch_chunks(args: argparse.Namespace, watch: Watch, chunks: list[Any]) -> list[Any]:
    from megatron_lowbit.megatron.run.steps import steps_of

    steps_of(args, chunks).listeners.append(watch.begin_step)
    chunks[-1].output_layer.register_forward_pre_hook(watch.end_layers)
    return chunks


def measure(name: str, args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Return a row's figures, or its error."""
    size = args.micro_batch_size
    words = [
        *(MODELS[args.model] + COMMON + ROWS[name]).split(), "--micro-batch-size", str(size),
        "--global-batch-size", str(size * args.gpus),
        "--train-iters", str(WARMUP + COUNTED + 1), *more,
    ]  # fmt: skip
    row = {"row": name, "model": args.model, "micro_batch_size": size, "arguments": words}
    with tempfile.TemporaryDirectory() as folder:
        rank = ["stored_weights", "--rank-in", folder, "--", *words]
        row |= train("benchmarks/__main__.py", rank, args.gpus)
        if "error" in row:
            return row
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return row | summary(ranks)


def summary(ranks: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Return the largest bytes of each rank's steps, and the median time of a step."""
    keys = ("allocated", "reserved", "allocated_before", "allocated_by_layers", "received")
    times = [max(steps) for steps in zip(*[[s["ms"] for s in r] for r in ranks], strict=True)]
    return {"median_ms": round(statistics.median(times), 1)} | {
        key: [max(step[key] for step in steps) for steps in ranks] for key in keys
    }


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name of a row's settings, which no others have."""
    return f"{row['model']} {row['micro_batch_size']} {row['row']}"


def main(argv: list[str] | None = None) -> None:
    """Measure the rows; the file is written after each."""
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    ours, more = words[:end], words[end + 1 :]
    if ours[:1] == ["--rank-in"]:
        train_rank(Path(ours[1]), more)
        return
    parser = training_steps.cases_parser(__doc__, seconds=560)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="llama3.2-1b")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="the tiny model")
    args = parser.parse_args(ours)
    if args.cpu:
        args.model = "tiny"
    settings = {"model": args.model, "micro_batch_size": args.micro_batch_size}
    chosen = {
        name_of({**settings, "row": name}): name
        for name in ROWS
        if not args.only or name in args.only
    }
    args.only = None
    run = lambda name, _: measure(name, args, more)  # noqa: E731
    run_cases(chosen, run, args, args.gpus, name_of=name_of)
