"""Whole training steps of models that users know, under recipes and in Megatron-LM's own precision.

    python benchmarks/flagship.py --output benchmarks/results/flagship-h100.json

Every case is a run of Megatron-LM on one GPU, with its loop, optimizer and logging, mock data and
Transformer Engine's layers. BF16 and blockwise FP8 are Megatron-LM's own: examples/own_script.py
without a recipe; for the hybrid, which that script does not build, pretrain_hybrid.py with
Megatron-LM's arguments alone. Without mamba-ssm and causal-conv1d its scans are slower ones.
Recipes quantize the linear layers of all blocks, as blockwise FP8 does. A row has the command line
that repeats it. The output gets the cases that it lacks: the same command continues where it ended.
On a host with two GPUs, two processes with --gpu and outputs of their own share the cases. --cpu
tries the script out.

Models have as many layers as fit into the 73 GiB that an H100 of 80 GB leaves to training. A
parameter takes 18 bytes: 2 of the BF16 weight, 4 of the main gradient, 12 of the FP32 weight and
Adam's two moments. Tokens of a micro batch take what is on top of that. GiB of a BF16 step, counted
by ``lowbit-plan --gpu h100 --gpus 1 --as-given`` with a model's arguments:

    llama-1b   1.50B parameters: 16 x 60.8M, embedding and output 525M
    llama-8b   218M a layer, 1.05B of embedding and output: 62 with 10 layers, 71 with 12, which
               leaves nothing to quantized weights (1 byte a parameter and orientation) and graphs
    qwen3-30b  623M a layer, 622M of embedding and output: 62 with 4 layers, 74 with 5
    hybrid-8b  110M a Mamba-2 block, 176M an MLP, 38M attention, 1.07B of embedding and output: 57
               with the first 11 blocks of its pattern

llama-8b-8k has sequences of 8192 tokens, as Llama 3 has: 61 GiB with 8 layers. The cases for the
141 GB of an H200 have such sequences, too: llama-8b-20 takes 118 GiB with 20 layers; llama-8b-32,
the whole model, takes 98 with recomputation and Adam's moments in BF16, 4 bytes a parameter in
place of 8.
"""

import argparse
import math
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from training_steps import (
    BLOCKWISE,
    GRAPHS,
    HYBRID,
    OURS,
    PADDED,
    ROOT,
    UPSTREAM,
    recipe,
    rows_of,
    train,
    training_command,
    write_rows,
)

from megatron_lowbit.analysis.machine import machine
from megatron_lowbit.command_line import expand_files
from megatron_lowbit.planning.training_arguments import TrainingArguments

PEAK_TFLOPS = 989
"""Dense BF16 TFLOP/s of an H100 SXM and of an H200 SXM, NVIDIA's data sheets."""
BF16, OWN_FP8 = "Megatron-LM BF16", "Megatron-LM FP8 blockwise"
RECIPES = ("fp8-tile", "mxfp8", "nvfp4", "nvfp4-fold", "mxfp4-backward", "torchao-v2")
ALL_BLOCKS = """
    --first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0
"""
"""No block in BF16, also of a preset that names some, under a recipe and in Megatron-LM's FP8."""
STEPS = """
    --bf16 --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --min-lr 1e-4
    --lr-decay-style constant --lr-warmup-iters 0 --eval-iters 0 --eval-interval 1000
    --log-interval 1 --log-throughput
"""
EXPERTS = "--moe-grouped-gemm --moe-permute-fusion"
LLAMA_8B = "@examples/llama3-8b.args --vocab-size 128256 --micro-batch-size 1"
OWN_LENGTH = "--seq-length 8192 --max-position-embeddings 8192 --global-batch-size 2"
"""Llama 3's own sequences: as many tokens a step as four sequences of the preset's length."""
TINY = "@examples/llama3-tiny.args --vocab-size 500"
WHOLE = """
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-distributed-optimizer --use-precision-aware-optimizer
    --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
"""


class Model(NamedTuple):
    """Model of a preset, with what differs from it; ``tiny`` is its twin for a CPU.

    ``own_fp8`` are Megatron-LM's arguments of FP8; ``graphs``: cases with CUDA graphs as well.
    ``needs_gib`` is the memory of a GPU below which its cases are left out.
    """

    title: str
    arguments: str
    tiny: str
    script: str = OURS
    own_fp8: str = BLOCKWISE
    graphs: bool = False
    needs_gib: int = 0


MODELS = {
    # The preset is another 1B model: MLPs, heads and groups are Llama 3.2's.
    "llama-1b": Model(
        "Llama-3.2-1B: 16 layers, its vocabulary, separate embeddings",
        "@examples/llama3-1b.args --ffn-hidden-size 8192 --num-attention-heads 32 "
        "--num-query-groups 8 --vocab-size 128256 --micro-batch-size 4 --global-batch-size 8",
        TINY,
        graphs=True,
    ),
    "llama-8b": Model(
        "Llama-3-8B: 10 of 32 layers, its vocabulary",
        f"{LLAMA_8B} --num-layers 10 --global-batch-size 4",
        f"{TINY} --num-layers 2",
        graphs=True,
    ),
    "llama-8b-8k": Model(
        "Llama-3-8B: 8 of 32 layers, its vocabulary, sequences of 8192 tokens",
        f"{LLAMA_8B} --num-layers 8 {OWN_LENGTH}",
        f"{TINY} --num-layers 2 --seq-length 256",
        graphs=True,
    ),
    "llama-8b-20": Model(
        "Llama-3-8B: 20 of 32 layers, its vocabulary, sequences of 8192 tokens",
        f"{LLAMA_8B} --num-layers 20 {OWN_LENGTH}",
        f"{TINY} --num-layers 3",
        graphs=True,
        needs_gib=120,
    ),
    "llama-8b-32": Model(
        "Llama-3-8B: the whole, its vocabulary, sequences of 8192 tokens, recomputation, Adam's "
        "moments in BF16",
        f"{LLAMA_8B} {OWN_LENGTH} {WHOLE}",
        f"{TINY} --num-layers 4",
        needs_gib=120,
    ),
    "qwen3-30b": Model(
        "Qwen3-30B-A3B: 4 of 48 layers, 128 experts, its vocabulary",
        "@examples/qwen3-30b-a3b.args --num-layers 4 --vocab-size 151936 "
        f"--micro-batch-size 2 --global-batch-size 4 {EXPERTS}",
        f"{TINY} --num-layers 2 --num-experts 4 "
        f"--moe-router-topk 2 --moe-ffn-hidden-size 64 {EXPERTS}",
        own_fp8=f"{BLOCKWISE} {PADDED}",
    ),
    "hybrid-8b": Model(
        "Nemotron-H-8B: the first 11 of 52 blocks, its vocabulary",
        "@examples/hybrid-8b.args --hybrid-layer-pattern M-M-M-M*-M- --vocab-size 131072 "
        "--micro-batch-size 1 --global-batch-size 2",
        "@examples/hybrid-tiny.args --vocab-size 500",
        script=HYBRID,
    ),
}


class Case(NamedTuple):
    """A model in a precision, with CUDA graphs or without: a script and its arguments."""

    model: str
    precision: str
    graphs: bool
    script: str
    arguments: str

    @property
    def name(self) -> str:
        """Name that ``--only`` looks in."""
        return f"{self.model} {'graphs ' if self.graphs else ''}{self.precision}"


def cases(recipes: Sequence[str] = RECIPES, tiny: bool = False) -> list[Case]:
    """Return all cases, those of a model together."""
    found = []
    for name, model in MODELS.items():
        # A CPU needs other arguments, which only this project's scripts change.
        alone = UPSTREAM if model.script == OURS and not tiny else model.script
        precisions = [
            (BF16, alone, ""),
            (OWN_FP8, alone, model.own_fp8),
            *((Path(one).stem, model.script, recipe(one)) for one in recipes),
        ]
        own = model.tiny if tiny else model.arguments
        found += [
            Case(name, precision, graphs, script, f"{own} {STEPS} {ALL_BLOCKS} {arguments} {more}")
            for graphs, more in ((False, ""), (True, GRAPHS))[: 1 + model.graphs]
            for precision, script, arguments in precisions
        ]
    return found


def words_of(case: Case, iterations: int) -> list[str]:
    """Return a case's arguments, relative to the root; Megatron-LM itself has no ``@FILE``."""
    count = ["--train-iters", str(iterations), "--log-memory-interval", str(iterations)]
    words = [*case.arguments.split(), *count]
    if case.script != UPSTREAM:
        return words
    return expand_files(word.replace("@", f"@{ROOT}/") for word in words)


def run_case(case: Case, iterations: int, gpu: int | None) -> dict[str, Any]:
    """Run a case on one GPU; return its row."""
    words = words_of(case, iterations)
    row = {
        "case": case.name,
        "model": case.model,
        "precision": case.precision,
        "graphs": case.graphs,
        "date": date.today().isoformat(),
        "commit": machine()["commit"],
        "command": training_command(case.script, words, gpus=1),
        **train(case.script, words, gpus=1, device=gpu),
    }
    if "median_ms" in row:
        row["tokens_per_s"] = round(1e3 * tokens_of(case) / row["median_ms"])
        row["mfu"] = round(row["tflop_per_s"] / PEAK_TFLOPS, 4)
    return row


def memory_gib(gpu: int) -> float:
    """Return the memory of a GPU."""
    return torch.cuda.get_device_properties(gpu).total_memory / 2**30


def tokens_of(case: Case) -> int:
    """Return the tokens of a step."""
    words = [word.replace("@", f"@{ROOT}/") for word in case.arguments.split()]
    flags = TrainingArguments(words).flags
    return flags.global_batch_size * flags.seq_length


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases that the output lacks; the file is written after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of names of cases")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="NAME_OR_FILE")
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--gpu", type=int, metavar="N", help="number of the GPU (default: first)")
    parser.add_argument("--seconds", type=float, default=500, help="start no case after these")
    parser.add_argument("--cpu", action="store_true", help="tiny models")
    parser.add_argument("--list", action="store_true", help="name the cases that are left, and end")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    args = parser.parse_args(argv)
    begin, rows = time.monotonic(), rows_of(args.output)
    done = {row["case"] for row in rows if "error" not in row}
    gib = math.inf if args.cpu else memory_gib(args.gpu or 0)
    chosen = [
        case
        for case in cases(args.recipes, args.cpu)
        if case.name not in done and MODELS[case.model].needs_gib <= gib
        if not args.only or any(part in case.name for part in args.only)
    ]
    if args.list:
        print(*(case.name for case in chosen), sep="\n")
        return
    for number, case in enumerate(chosen):
        if time.monotonic() - begin > args.seconds:
            print(f"{len(chosen) - number} cases are left; the same command continues with them")
            break
        row = run_case(case, args.iterations, args.gpu)
        print({key: row[key] for key in row if key not in ("command", "losses")}, flush=True)
        # An error gives way to what a later run of its case has.
        rows = [*(other for other in rows if other["case"] != case.name), row]
        titles = {name: model.title for name, model in MODELS.items()}
        write_rows(args.output, rows, gpus=1, models=titles, peak_tflops=PEAK_TFLOPS)


if __name__ == "__main__":
    main()
