"""Whole training steps of Megatron-LM, with and without recipes, in several layouts.

    python benchmarks/megatron_lm.py --gpus 2 --output benchmarks/results/megatron_lm-2xh100.json

Each case is a run of its own: ``pretrain_gpt.py``, or ``examples/own_script.py`` without a recipe,
which is Megatron-LM itself. Its time is the median of the settled steps. A case that ends in an
error is kept with the error's line. Rows are added to those of a file that exists. On CPUs
(``--cpu``) it is for trying the script out.
"""

import argparse
import json
import math
import shlex
import shutil
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from training_steps import (
    BLOCKWISE,
    GRAPHS,
    OURS,
    PADDED,
    UPSTREAM,
    recipe,
    rows_of,
    train,
    write_rows,
)

LARGE = """
    --num-layers 6 --hidden-size 2048 --ffn-hidden-size 7168 --num-attention-heads 16
    --group-query-attention --num-query-groups 8 --seq-length 2048 --max-position-embeddings 2048
    --global-batch-size 8 --bf16 --vocab-size 32000
"""
SMALL = """
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 32 --max-position-embeddings 32
    --global-batch-size 8 --vocab-size 500
"""
COMMON = """
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --lr 1e-3 --min-lr 1e-3 --lr-decay-iters 100 --clip-grad 1.0 --mock-data
    --tokenizer-type NullTokenizer --eval-iters 0 --eval-interval 1000 --log-interval 1
    --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion
"""
ONE = "--micro-batch-size 8"
TP = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 8"
DP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 4"
PP = "--pipeline-model-parallel-size 2 --micro-batch-size 2"
CP = "--context-parallel-size 2 --micro-batch-size 8"
FSDP = """
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --ckpt-format fsdp_dtensor --micro-batch-size 4 --use-distributed-optimizer
"""
EXPERTS = """
    --micro-batch-size 8 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 1792
    --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
"""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
ASYNC = "--async-save --async-strategy mcore --use-persistent-ckpt-worker"
RESUMED = "--num-layers 2 --vocab-size 8000 --deterministic-mode"
"""Arguments of cases that compare losses: small checkpoints, no atomic additions in attention."""


class Case(NamedTuple):
    """A run: its name, its script, its own arguments.

    ``resumed``: the run is made once whole and once more from its middle, and the losses are
    compared.
    """

    name: str
    script: str
    arguments: str
    resumed: bool = False


def steps_of_small_models(layout: str, arguments: str) -> list[Case]:
    """Return runs with and without graphs: of BF16, Megatron-LM's own FP8 and recipes."""
    cases = [
        Case("upstream bf16", UPSTREAM, ""),
        *(Case(name, OURS, recipe(name)) for name in ("fp8-tile", "nvfp4", "mxfp4-backward")),
        Case("upstream blockwise", UPSTREAM, BLOCKWISE),
    ]
    return [
        Case(f"{layout} {how}{case.name}", case.script, f"{arguments} {case.arguments} {more}")
        for case in cases
        for how, more in (("", ""), ("graphs ", GRAPHS))
    ]


CASES = [
    *steps_of_small_models("one GPU", ONE),
    *steps_of_small_models("two GPUs", TP),
    Case("experts upstream bf16", UPSTREAM, EXPERTS),
    *(Case(f"experts {r}", OURS, f"{EXPERTS} {recipe(r)}") for r in ("fp8-tile", "mxfp8", "nvfp4")),
    Case("experts upstream blockwise", UPSTREAM, f"{EXPERTS} {BLOCKWISE} {PADDED}"),
    Case("DP2 upstream bf16", UPSTREAM, DP),
    Case("DP2 bf16", OURS, DP),
    Case("DP2 nvfp4", OURS, f"{DP} {recipe('nvfp4')}"),
    Case("DP2 fp8-tile", OURS, f"{DP} {recipe('fp8-tile')}"),
    Case("TP2 upstream bf16", UPSTREAM, TP),
    Case("TP2 bf16", OURS, TP),
    Case("TP2 nvfp4", OURS, f"{TP} {recipe('nvfp4')}"),
    Case("PP2 nvfp4", OURS, f"{PP} {recipe('nvfp4')}"),
    Case("CP2 nvfp4", OURS, f"{CP} {recipe('nvfp4')}"),
    Case("FSDP upstream bf16", UPSTREAM, FSDP),
    Case("FSDP bf16", OURS, FSDP),
    Case("FSDP nvfp4", OURS, f"{FSDP} {recipe('nvfp4')}"),
    Case("DP2 nvfp4, synchronous save", OURS, f"{DP} {RESUMED} {recipe('nvfp4')}", resumed=True),
    Case("DP2 nvfp4, async save", OURS, f"{DP} {ASYNC} {RESUMED} {recipe('nvfp4')}", resumed=True),
    Case(
        "TP2 nvfp4, full recompute", OURS, f"{TP} {FULL} {RESUMED} {recipe('nvfp4')}", resumed=True
    ),
    Case(
        "TP2 nvfp4, selective", OURS, f"{TP} {SELECTIVE} {RESUMED} {recipe('nvfp4')}", resumed=True
    ),
    Case("own script nvfp4", UPSTREAM, f"{DP} {recipe('nvfp4')}"),
]


def main() -> None:
    """Run the cases; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--iterations", type=int, default=26)
    parser.add_argument("--stop", action="store_true", help="stop at the first error")
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--repeat", type=int, default=1, help="go through the cases so often")
    parser.add_argument("--seconds", type=float, default=570, help="start no case after these")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    begin = time.monotonic()
    rows = rows_of(args.output)
    chosen = [c for c in CASES if not args.only or any(part in c.name for part in args.only)]
    for case in chosen * args.repeat:
        if time.monotonic() - begin > args.seconds:
            rows.append({"case": case.name, "error": "not run: out of time"})
            continue
        row = {"case": case.name, "date": date.today().isoformat(), **run_case(case, args)}
        print(row, flush=True)
        rows.append(row)
        if args.stop and "error" in row:
            break
        write_rows(args.output, rows, args.gpus, model=LARGE.split())


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Return a case's figures, or its error."""
    folder = Path(tempfile.mkdtemp())
    try:
        if not case.resumed:
            return steps_of(case, args, [])
        half = args.iterations // 2
        whole = [*save_to(folder / "whole", half), *load_from(folder / "whole")]
        first = steps_of(case, args, whole)
        (folder / "parts").mkdir()
        iteration = f"iter_{half:07d}"
        if "error" in first:
            return first
        shutil.copytree(folder / "whole" / iteration, folder / "parts" / iteration)
        (folder / "parts" / "latest_checkpointed_iteration.txt").write_text(str(half))
        parts = [*save_to(folder / "parts", 1000), *load_from(folder / "parts")]
        second = steps_of(case, args, parts)
        if "error" in second:
            return second
        # Not from the console, where the second line after a start is the mean of two steps.
        losses = [logged_losses(folder / name) for name in ("whole", "parts")]
        after = [i for i in losses[0] if i > half]
        gaps = [abs(losses[0][i] - losses[1].get(i, math.inf)) for i in after]
        return {**first, "resumed_losses": len(gaps), "largest_difference": max(gaps)}
    finally:
        shutil.rmtree(folder)


def logged_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each iteration in a run's metrics.jsonl."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}


def save_to(folder: Path, interval: int) -> list[str]:
    """Return the arguments that save every so many iterations."""
    return ["--save", str(folder), "--save-interval", str(interval)]


def load_from(folder: Path) -> list[str]:
    """Return the arguments that go on from a checkpoint."""
    return ["--load", str(folder)]


def steps_of(case: Case, args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Run a case once; ``more`` are arguments beside its own."""
    words = shlex.split((SMALL if args.cpu else LARGE) + COMMON + case.arguments)
    iterations = ["--train-iters", str(args.iterations)]
    return train(case.script, [*words, *iterations, *more], args.gpus)


if __name__ == "__main__":
    main()
