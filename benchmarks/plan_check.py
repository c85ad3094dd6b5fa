"""Train a few models for a few iterations, to check the planner's memory and speed.

    python benchmarks/plan_check.py --output benchmarks/results/plan_check-4xh200.json
    python docs/generate/planning.py

Started once on a host with 1, 2 or 4 GPUs: cases run beside one another on different GPUs, those
that need more GPUs than there are wait for another host. Tokens are random (--mock-data). Other
arguments go to the training script. The file is written after every case; cases that it, or another
plan_check-*.json of the same Megatron-LM beside it, holds already are not repeated.
Without a GPU tiny twins of the models run on the CPU, to try the script out. The second command
writes what was measured into docs/planning.md.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, NamedTuple

import timing
import torch
from model import VOCABULARY
from rich.console import Console
from training_steps import read_log

from megatron_lowbit.planning.training_arguments import TrainingArguments

ROOT = Path(__file__).parents[1]
ITERATIONS, COUNTED = 12, 6
"""Iterations of a run, and the last ones that count: the first ones compile kernels."""
PATIENCE_S = 120

MODELS = {
    "Llama-3-8B's width, 6 layers": "@llama3-8b --num-layers 6 --micro-batch-size 2",
    "Llama-3 1B": "@llama3-1b --micro-batch-size 4",
    "Llama-3 1B, 512 tokens": "@llama3-1b --seq-length 512",
    "hybrid, 7 blocks of 2048": "@hybrid-8b --hidden-size 2048 "
    "--ffn-hidden-size 8192 --num-attention-heads 16 --hybrid-layer-pattern=M-M*-M- "
    "--seq-length 4096",
}
TINY = {
    "Llama-3-8B's width, 6 layers": "@llama3-tiny",
    "Llama-3 1B": "@llama3-tiny --num-layers 2",
    "Llama-3 1B, 512 tokens": "@llama3-tiny --num-layers 2 --seq-length 64",
    "hybrid, 7 blocks of 2048": "@hybrid-tiny",
}
RECIPES = {
    "bf16": "--precision-recipe bf16",
    "fp8-tile": "--fp8-recipe fp8-tile",
    "nvfp4": "--fp4-recipe nvfp4 --recipe-set bf16_blocks=none",
    "mxfp4-backward": "--fp4-recipe mxfp4-backward",
}
LAYOUTS = {
    "1 GPU": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "DP2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "TP4": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "DP4": (4, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
}
NAME = ("model", "recipe", "layout")
_BIG, _SMALL, _SHORT, _HYBRID = MODELS
PLANNED = [
    *((_BIG, recipe, "1 GPU") for recipe in RECIPES),
    (_SMALL, "bf16", "1 GPU"), (_SMALL, "nvfp4", "1 GPU"),
    (_HYBRID, "bf16", "1 GPU"), (_HYBRID, "nvfp4", "1 GPU"),
    (_BIG, "bf16", "TP2"), (_BIG, "nvfp4", "TP2"), (_BIG, "bf16", "PP2"), (_BIG, "fp8-tile", "DP2"),
    (_BIG, "fp8-tile", "TP2"), (_BIG, "fp8-tile", "TP4"), (_BIG, "bf16", "TP4"),
    (_BIG, "bf16", "DP4"),
    # Of so few tokens that launching kernels takes longer than running them.
    *((_SHORT, recipe, "1 GPU") for recipe in ("bf16", "fp8-tile", "nvfp4")),
    (_SHORT, "bf16", "TP2"), (_SHORT, "fp8-tile", "TP2"), (_SHORT, "fp8-tile", "TP4"),
]  # fmt: skip


class Case(NamedTuple):
    """A model under a recipe in a layout, as keys of the tables above, and its arguments."""

    model: str
    recipe: str
    layout: str
    arguments: list[str]

    @property
    def gpus(self) -> int:
        """Processes that it takes, a GPU each."""
        return LAYOUTS[self.layout][0]

    @property
    def name(self) -> list[str]:
        """Return what tells a case from others."""
        return [self.model, self.recipe, self.layout]


class Started(NamedTuple):
    """A case that runs: on which devices, since when, where it writes."""

    case: Case
    devices: list[str]
    process: subprocess.Popen
    since: float
    folder: tempfile.TemporaryDirectory
    output: IO[str]


def cases(tiny: bool) -> list[Case]:
    """Return all of them, with presets as files relative to the repository."""
    models = TINY if tiny else MODELS
    found = []
    for model, recipe, layout in PLANNED:
        gpus, ranks = LAYOUTS[layout]
        words = f"{models[model]} {RECIPES[recipe]} {ranks}".split()
        words = [f"@examples/{word[1:]}.args" if word[0] == "@" else word for word in words]
        # As many microbatches as pipeline stages need to overlap.
        replicas = gpus if layout.startswith("DP") else 1
        microbatches = 4 if layout.startswith("PP") else 2
        size = 1
        if "--micro-batch-size" in words:
            size = int(words[words.index("--micro-batch-size") + 1])
        if not tiny:  # padded to the same vocabulary in every layout
            split = gpus if layout.startswith("TP") else 1
            words += ["--make-vocab-size-divisible-by", str(VOCABULARY // split)]
        words += ["--micro-batch-size", str(size)]
        words += ["--global-batch-size", str(size * replicas * microbatches), "--bf16"]
        words += ["--hidden-dropout", "0", "--attention-dropout", "0"]
        # That fusion needs Apex, which Megatron-LM does without.
        words += ["--no-gradient-accumulation-fusion"]
        found.append(Case(model, recipe, layout, words))
    return found


def start(case: Case, devices: Sequence[str], more: Sequence[str]) -> Started:
    """Begin to train a case on so many devices."""
    folder = tempfile.TemporaryDirectory()
    output = (Path(folder.name) / "output").open("w+")
    hybrid = case.model == _HYBRID
    script = str(ROOT / ("pretrain_hybrid.py" if hybrid else "pretrain_gpt.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    command = [
        sys.executable, *(launcher if case.gpus > 1 else []), script, *case.arguments,
        "--train-iters", str(ITERATIONS), "--lr", "1e-4", "--lr-decay-style", "constant",
        "--lr-warmup-iters", "0", "--eval-iters", "0", "--eval-interval", "1000",
        "--log-interval", "1", "--log-memory-interval", str(ITERATIONS), "--mock-data",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY), *more,
    ]  # fmt: skip
    environment = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1")
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    return Started(case, list(devices), process, time.monotonic(), folder, output)


def end(started: Started) -> None:
    """End a case, with the ranks that its launcher started."""
    os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait()


def result(started: Started) -> dict:
    """Return what a case that ended measured, or why it failed."""
    case = started.case
    row = dict(zip(NAME, case.name, strict=True))
    row |= {"gpus": case.gpus, "arguments": case.arguments}
    row["seconds"] = round(time.monotonic() - started.since, 1)
    started.output.seek(0)
    output = started.output.read()
    started.output.close()
    started.folder.cleanup()
    if started.process.returncode:
        named = [line for line in output.splitlines() if "rror: " in line]
        last = (named or output.splitlines() or [f"exit status {started.process.returncode}"])[-1]
        return row | {"failed": last.replace(f"{ROOT}/", "").strip()[:300]}
    tokens = tokens_of(case.arguments)
    milliseconds, row["memory_gib"] = read_output(output)
    row["tokens_per_s"] = round(1e3 * tokens / statistics.median(milliseconds[-COUNTED:]), 1)
    return row


def read_output(output: str) -> tuple[list[float], list[float]]:
    """Return the milliseconds of every iteration, and the most GiB of each rank that reports it."""
    log = read_log(output)
    return list(log.milliseconds.values()), list(log.memory_gib.values())


def tokens_of(arguments: Sequence[str]) -> int:
    """Return the tokens of a step."""
    args = TrainingArguments([word.replace("@examples", f"@{ROOT}/examples") for word in arguments])
    return args.flags.global_batch_size * args.flags.seq_length


def run(
    todo: list[Case], devices: list[str], more: Sequence[str], seconds: float
) -> Iterable[dict]:
    """Yield rows of the cases as they end, as many at a time as have devices."""
    begin, free, running = time.monotonic(), list(devices), []
    waiting = [case for case in todo if case.gpus <= len(devices)]
    try:
        while waiting or running:
            late = time.monotonic() - begin > seconds
            for case in [] if late else list(waiting):
                if case.gpus <= len(free):
                    taken, free = free[: case.gpus], free[case.gpus :]
                    running.append(start(case, taken, more))
                    waiting.remove(case)
                elif case.gpus > 1:
                    break  # or small cases would keep a large one waiting for ever
            for started in list(running):
                overdue = time.monotonic() - started.since > PATIENCE_S
                if started.process.poll() is None and not overdue:
                    continue
                if overdue:
                    end(started)
                running.remove(started)
                free += started.devices
                yield result(started)
            if late and not running:
                break
            time.sleep(0.2)
    finally:
        for started in running:
            end(started)


def measure(args: argparse.Namespace, more: Sequence[str]) -> None:
    """Run what the file lacks, writing it after every case."""
    cuda = torch.cuda.is_available()
    number = torch.cuda.device_count() if cuda else 2
    number = min(number, args.gpus or number)
    data = {"machine": timing.description(), "gpus": number, "rows": []}
    if args.output.is_file():
        data = json.loads(args.output.read_text())
    held = data["rows"] + [row for file in others(args.output) for row in file["rows"]]
    done = [[row[key] for key in NAME] for row in held]
    todo = [case for case in cases(tiny=not cuda) if case.name not in done]
    console = Console(width=120)
    for row in run(todo, list(map(str, range(number))), more, args.seconds):
        data["rows"].append(row | {"vocabulary": VOCABULARY})
        args.output.write_text(json.dumps(data, indent=1) + "\n")
        console.print({key: row[key] for key in row if key != "arguments"})


def others(output: Path) -> list[dict]:
    """Return what this Megatron-LM measured on other machines, in files beside the output."""
    files = set(output.parent.glob("plan_check-*.json")) - {output}
    found = [json.loads(file.read_text()) for file in sorted(files)]
    return [data for data in found if data["machine"]["megatron_core"] == version("megatron-core")]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the output lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--gpus", type=int, help="largest number of GPUs to use (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=200, help="after which no case is begun (default: 200)"
    )
    measure(*parser.parse_known_args(argv))


if __name__ == "__main__":
    main()
