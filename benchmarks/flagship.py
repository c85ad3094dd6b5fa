"""Whole training steps of models that users know, under recipes and in Megatron-LM's own precision.

    python -m benchmarks flagship --output benchmarks/results/flagship-h100.json

Every case is a run of Megatron-LM on one GPU, or on as many as its model says, with its loop,
optimizer and logging, mock data and Transformer Engine layers: a model of cases/flagship.yaml in a
precision. Megatron-LM's own run in examples/own_script.py without a recipe; for the hybrid, which
that script does not build, in pretrain_hybrid.py with only Megatron-LM's arguments. Without
mamba-ssm and causal-conv1d its scans are slower ones. Recipes quantize the linear layers of all
blocks, as Megatron-LM's FP8 does. Cases with Liger's loss need liger-kernel. A row has the command
line that repeats it. The output gets the cases that it lacks: the same command continues where it
ended. --gpu 0 1 runs a case on each of two GPUs at once; cases of four GPUs need --gpu 0 1 2 3.
--cpu tries the script out.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import records, training_steps
from benchmarks.training_steps import (
    OURS,
    UPSTREAM,
    cases_file,
    run_cases,
    tokens_of,
    train,
    training_command,
)
from megatron_lowbit.analysis.machine import machine
from megatron_lowbit.command_line import expand_files

PEAK_TFLOPS = 989
"""Dense BF16 TFLOP/s of an H100 SXM and of an H200 SXM, NVIDIA's data sheets."""
NOT_IN_GRAPHS = (
    "--overlap-moe-expert-parallel-comm", "--quantized-expert-dispatch", "--transformer-impl",
)  # fmt: skip
DECLARED = cases_file("flagship")
MODELS: dict[str, dict[str, Any]] = DECLARED["models"]


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

    @property
    def gpus(self) -> int:
        """Number of GPUs that it takes."""
        return int(MODELS[self.model].get("gpus", 1))


def cases(tiny: bool = False) -> list[Case]:
    """Return all cases, ordered by model."""
    made = []
    for name, model in MODELS.items():
        script = model.get("script", OURS)
        # A CPU needs other arguments, which only this project's scripts change.
        upstream = UPSTREAM if script == OURS and not tiny else script
        precisions = DECLARED["precisions"] | model.get("precisions", {})
        common = f"{model['tiny' if tiny else 'arguments']} {DECLARED['arguments']}"
        common += DECLARED["all_blocks"]
        for graphs in (False, True) if "graphs" in model else (False,):
            for precision, arguments in precisions.items():
                excluded = graphs and any(word in arguments for word in NOT_IN_GRAPHS)
                if excluded or not precision.endswith(model.get("loss", "")):
                    continue
                words = f"{common} {arguments} {model['graphs'] if graphs else ''}"
                if "--fp8-format" in arguments:
                    words += f" {model.get('own_fp8', '')}"
                    words += f" {model.get('own_fp8_graphs', '')}" if graphs else ""
                own = "--precision-recipe" in arguments
                made.append(Case(name, precision, graphs, script if own else upstream, words))
    return made


def words_of(case: Case, iterations: int) -> list[str]:
    """Return a case's arguments, relative to the root; Megatron-LM itself has no ``@FILE``."""
    count = ["--train-iters", str(iterations), "--log-memory-interval", str(iterations)]
    words = [*case.arguments.split(), *count]
    if case.script != UPSTREAM:
        return words
    return expand_files(training_steps.from_root(words))


def run_case(case: Case, iterations: int, gpus: str | None) -> dict[str, Any]:
    """Run a case on GPUs, such as "0,1"; return its row, with the rates of one GPU."""
    words = words_of(case, iterations)
    row = {
        "model": case.model,
        "precision": case.precision,
        "graphs": case.graphs,
        "commit": machine()["commit"],
        "command": training_command(case.script, words, case.gpus),
        **train(case.script, words, case.gpus, gpus),
        "cublaslt": records.cublaslt(),
    }
    if "median_ms" in row:
        tokens = tokens_of(case.arguments.split()) / case.gpus
        row["tokens_per_s"] = round(1e3 * tokens / row["median_ms"])
        row["mfu"] = round(row["tflop_per_s"] / PEAK_TFLOPS, 4)
    return row


def memory_gib(gpu: int) -> float:
    """Return the memory of a GPU."""
    return torch.cuda.get_device_properties(gpu).total_memory / 2**30


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases that the output lacks; the file is written after each."""
    parser = training_steps.cases_parser(__doc__, seconds=500)
    parser.add_argument("--iterations", type=int, default=14)
    training_steps.add_gpus(parser)
    parser.add_argument("--cpu", action="store_true", help="tiny models")
    args = parser.parse_args(argv)
    gib = math.inf if args.cpu else min(memory_gib(gpu or 0) for gpu in args.gpus)
    fitting = {
        case.name: case
        for case in cases(args.cpu)
        if MODELS[case.model].get("needs_gib", 0) <= gib and case.gpus <= len(args.gpus)
    }
    run = lambda case, gpus: run_case(case, args.iterations, gpus)  # noqa: E731
    titles = {name: model["title"] for name, model in MODELS.items()}
    run_cases(fitting, run, args, len(args.gpus), args.gpus, models=titles, peak_tflops=PEAK_TFLOPS)
