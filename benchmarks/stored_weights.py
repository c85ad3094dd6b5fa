"""Memory and gathered bytes of whole training steps, with weights in BF16 and stored as codes.

    python benchmarks/stored_weights.py --output benchmarks/results/stored_weights-2xh100.json

A row is a run of its own: ``pretrain_gpt.py``'s, on as many data-parallel ranks as ``--gpus``, with
the distributed optimizer and Transformer Engine's layers. Memory is the most that torch has
allocated, and reserved, from a step's first forward pass to the next step's, on each rank; gathered
bytes are what a rank receives of parameters in that time, by the sizes of its collectives. Two
steps come before. Arguments after ``--`` go to the training script. Rows are added to those of a
file that exists. On CPUs (``--cpu``) it is for trying the script out, without memory.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training_steps import PATIENCE_S, rows_of, train, write_rows

WARMUP = 2
"""Steps before those that count: compilation, the optimizer's moments, the first gather."""
MODELS = {
    # Llama 3.2 1B: embeddings are tied.
    "llama3.2-1b": """
        --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32
        --num-query-groups 8 --kv-channels 64 --seq-length 8192 --max-position-embeddings 8192
        --vocab-size 128256
    """,
    # examples/llama3-1b.args: a narrow MLP, separate embeddings.
    "llama3-1b": """
        --num-layers 16 --hidden-size 2048 --ffn-hidden-size 3072 --num-attention-heads 16
        --num-query-groups 4 --seq-length 8192 --max-position-embeddings 8192
        --vocab-size 128256 --untie-embeddings-and-output-weights
    """,
    "tiny": """
        --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
        --num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --vocab-size 512
    """,
}
COMMON = """
    --group-query-attention --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000 --hidden-dropout 0 --attention-dropout 0
    --bf16 --use-distributed-optimizer --cross-entropy-loss-fusion
    --lr 3e-4 --min-lr 3e-4 --lr-decay-iters 100 --clip-grad 1.0 --mock-data
    --tokenizer-type NullTokenizer --eval-iters 0 --eval-interval 1000 --log-interval 1
    --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion
"""
STORED = "--quantized-param-gather"
FP8_INPUT = "--activation-func-fp8-input-store"
FP8_MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
OPTIONS = {
    "": "",
    ", codes": STORED,
    ", codes, FP8 SwiGLU": f"{STORED} {FP8_INPUT}",
    ", codes, FP8 SwiGLU, FP8 moments": f"{STORED} {FP8_INPUT} {FP8_MOMENTS}",
}
ROWS = {
    "bf16": "--precision-recipe bf16",
    "bf16, FP8 SwiGLU": f"--precision-recipe bf16 {FP8_INPUT}",
} | {
    f"{recipe}{name}": f"--precision-recipe {recipe} {more}"
    for recipe in ("fp8-tile", "nvfp4")
    for name, more in OPTIONS.items()
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


def count_received(found: Counter[str]) -> None:
    """Count the bytes of parameters that this rank receives from now on.

    Those are Megatron-LM's gathers, and the broadcasts of stored weights.
    """
    from megatron.core.distributed import param_and_grad_buffer

    broadcast, gather = dist.broadcast, param_and_grad_buffer.dist_all_gather_func

    def counted_broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        source = kwargs.get("group_src")
        if source is not None and source != dist.get_rank(kwargs["group"]):
            found["received"] += tensor.nbytes
        return broadcast(tensor, *args, **kwargs)

    def counted_gather(whole: torch.Tensor, own: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found["received"] += whole.nbytes - own.nbytes
        return gather(whole, own, *args, **kwargs)

    dist.broadcast = counted_broadcast
    param_and_grad_buffer.dist_all_gather_func = counted_gather


def train_rank(folder: Path, words: list[str]) -> None:
    """Train as one rank; write its steps to ``folder``/RANK.json."""
    import megatron_lowbit.megatron  # noqa: F401  before megatron
    from megatron_lowbit.arguments import parse_arguments
    from megatron_lowbit.arguments.parse import command_line
    from megatron_lowbit.megatron import pretrain

    watch = Watch()
    count_received(watch.received)
    args = parse_arguments(words, False)
    with pretrain.teardown(), command_line(args.upstream_command_line):
        pretrain.run(args, [partial(_watch_chunks, args, watch)])
    path = folder / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(watch.steps))


def _watch_chunks(args: argparse.Namespace, watch: Watch, chunks: list[Any]) -> list[Any]:
    from megatron_lowbit.megatron.steps import steps_of

    steps_of(args, chunks).listeners.append(watch.begin_step)
    chunks[-1].output_layer.register_forward_pre_hook(watch.end_layers)
    return chunks


def measure(name: str, args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Return a row's figures, or its error."""
    size = args.micro_batch_size
    batches = ["--micro-batch-size", str(size), "--global-batch-size", str(size * args.gpus)]
    words = [
        *shlex.split(MODELS[args.model] + COMMON + ROWS[name]), *batches,
        "--train-iters", str(WARMUP + args.steps + 1), *more,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        own = ["--rank-in", folder, "--", *words]
        script = f"benchmarks/{Path(__file__).name}"
        row = {"arguments": words} | train(script, own, args.gpus, patience=args.patience)
        if "error" in row:
            return row
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return row | summary(ranks)


def summary(ranks: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Return the largest bytes of each rank's steps, and the median time of a step."""

    def largest(key: str) -> list[float]:
        return [max(step[key] for step in steps) for steps in ranks]

    keys = ("allocated", "reserved", "allocated_before", "allocated_by_layers", "received")
    times = [max(steps) for steps in zip(*[[s["ms"] for s in r] for r in ranks], strict=True)]
    return {"median_ms": round(statistics.median(times), 1), **{key: largest(key) for key in keys}}


def main(argv: list[str] | None = None) -> None:
    """Measure the rows; the file is written after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="llama3.2-1b")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--seconds", type=float, default=560, help="start no row after these")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, help="seconds of a row at most"
    )
    parser.add_argument("--cpu", action="store_true", help="the tiny model")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    own, more = _split(words)
    args = parser.parse_args(own)
    if args.rank_in:
        train_rank(args.rank_in, more)
        return
    if args.output is None:
        parser.error("--output is missing")
    if args.cpu:
        args.model = "tiny"
    _measure_all(args, more, measure)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _measure_all(args: argparse.Namespace, more: list[str], run: Callable[..., Any]) -> None:
    begin = time.monotonic()
    rows = rows_of(args.output)
    for name in args.only or ROWS:
        if time.monotonic() - begin > args.seconds:
            print(f"not run, out of time: {name}")
            continue
        row = {
            "row": name, "model": args.model, "micro_batch_size": args.micro_batch_size,
            "date": date.today().isoformat(), **run(name, args, more),
        }  # fmt: skip
        print({key: value for key, value in row.items() if key != "arguments"}, flush=True)
        rows.append(row)
        write_rows(args.output, rows, args.gpus)


if __name__ == "__main__":
    main()
