"""Train a few models for a few iterations, to check the planner's memory and speed.

    python benchmarks/plan_check.py --data-path data/stdlib --tokenizer-model data/tokenizer \
        --output benchmarks/results/plan_check-4xh200.json
    python benchmarks/plan_check.py --page

Started once on a host with 1, 2 or 4 GPUs: cases run beside one another on different GPUs, those
that need more GPUs than there are wait for another host. What this script does not know goes to the
training script. The file is written after every case; cases that it holds already are not repeated.
Without a GPU tiny twins of the models run on the CPU, to try the script out.

--page sets the planner's figures beside all that was measured so far, in docs/planning.md, and
renews what that page calculates.
"""

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import timing
import torch
from model import CONTENDERS, MODEL, VOCABULARY, ours
from performance_page import table
from rich.console import Console

from megatron_lowbit.planning.command import complete, plan, vocabulary_size
from megatron_lowbit.planning.communication import Cluster
from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.estimate import Estimate
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import candidates, given
from megatron_lowbit.planning.memory import usable_bytes
from megatron_lowbit.planning.routing import needs_transformer_engine
from megatron_lowbit.recipes import load_recipes
from megatron_lowbit.training.arguments import parse_arguments

ROOT = Path(__file__).parents[1]
MADE = "made by `python benchmarks/plan_check.py --page`"
ITERATIONS, COUNTED = 12, 6
"""Of so many iterations the last are counted: the first ones compile kernels."""
PATIENCE_S = 120
SCANS = {"mamba-ssm, convolution": "mamba-ssm", "mamba-ssm's": "mamba-ssm-scan",
         "torch": "torch"}  # fmt: skip
"""How training begins to say which scan runs, and what the planner calls it."""

MODELS = {
    "Llama-3-8B's width, 6 layers": "@llama3-8b --num-layers 6 --micro-batch-size 2",
    "Llama-3 1B": "@llama3-1b --micro-batch-size 4",
    "hybrid, 7 blocks of 2048": "@hybrid-8b --num-layers 7 --hidden-size 2048 "
    "--ffn-hidden-size 8192 --num-attention-heads 16 --hybrid-override-pattern=M-M*-M- "
    "--seq-length 4096",
}
TINY = {
    "Llama-3-8B's width, 6 layers": "@llama3-tiny",
    "Llama-3 1B": "@llama3-tiny --num-layers 2",
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
_BIG, _SMALL, _HYBRID = MODELS
PLANNED = [
    *((_BIG, recipe, "1 GPU") for recipe in RECIPES),
    (_SMALL, "bf16", "1 GPU"), (_SMALL, "nvfp4", "1 GPU"),
    (_HYBRID, "bf16", "1 GPU"), (_HYBRID, "nvfp4", "1 GPU"),
    (_BIG, "bf16", "TP2"), (_BIG, "nvfp4", "TP2"), (_BIG, "bf16", "PP2"), (_BIG, "fp8-tile", "DP2"),
    (_BIG, "fp8-tile", "TP4"), (_BIG, "bf16", "DP4"),
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
        """What tells it from other cases."""
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
    """All of them, with presets as files relative to the repository."""
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
        words += ["--transformer-impl", "local"]
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
        "--lr-warmup-iters", "0", "--eval-iters", "0", "--log-interval", "1",
        "--log-file-dir", folder.name, *more,
    ]  # fmt: skip
    environment = dict(os.environ)
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
    """What a case that ended measured, or why it failed."""
    case = started.case
    row = dict(zip(NAME, case.name, strict=True))
    row |= {"gpus": case.gpus, "arguments": case.arguments}
    row["seconds"] = round(time.monotonic() - started.since, 1)
    started.output.seek(0)
    output = started.output.read()
    logs = [file.read_text() for file in sorted(Path(started.folder.name).glob("rank_*.log"))]
    started.output.close()
    started.folder.cleanup()
    if started.process.returncode:
        named = [line for line in output.splitlines() if "rror: " in line]
        last = (named or output.splitlines() or [f"exit status {started.process.returncode}"])[-1]
        return row | {"failed": last.replace(f"{ROOT}/", "").strip()[:300]}
    speeds, memory = read_logs(logs)
    row["tokens_per_s"] = round(statistics.median(speeds[-COUNTED:]), 1)
    row["memory_gib"] = memory
    scan = re.search(r"Mamba scan: (.*)", output)
    if scan is not None:
        row["scan"] = next(name for text, name in SCANS.items() if scan[1].startswith(text))
    return row


def read_logs(logs: Sequence[str]) -> tuple[list[float], list[float]]:
    """Tokens a second of every iteration of the first rank, and the most GiB of each rank."""
    speed = re.compile(r"\| ([\d,]+) tokens/s")
    memory = re.compile(r"\| ([\d.]+) GiB")
    speeds = [float(found.replace(",", "")) for found in speed.findall(logs[0])]
    return speeds, [max(map(float, memory.findall(log))) for log in logs]


def run(
    todo: list[Case], devices: list[str], more: Sequence[str], seconds: float
) -> Iterable[dict]:
    """Rows of the cases as they end, as many at a time as have devices; late ones are not begun."""
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
    done = [[row[key] for key in NAME] for row in data["rows"]]
    todo = [case for case in cases(tiny=not cuda) if case.name not in done]
    data_path, tokenizer = Path(args.data_path).absolute(), Path(args.tokenizer_model).absolute()
    given_to_all = ["--data-path", str(data_path), "--tokenizer-model", str(tokenizer), *more]
    console = Console(width=120)
    for row in run(todo, list(map(str, range(number))), given_to_all, args.seconds):
        data["rows"].append(row | {"vocabulary": vocabulary_of(args.tokenizer_model)})
        args.output.write_text(json.dumps(data, indent=1) + "\n")
        console.print({key: row[key] for key in row if key != "arguments"})


def vocabulary_of(folder: str) -> int:
    """The tokenizer's size."""
    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 1"
    words += f" --micro-batch-size 1 --tokenizer-model {shlex.quote(folder)}"
    return vocabulary_size(parse_arguments(complete(shlex.split(words))))


def planned(
    words: Sequence[str], gpus: int, vocabulary: int, kind: str, scan: str, accumulate: bool = True
) -> Estimate:
    """The planner's figures of training's arguments as they are."""
    here = [word.replace("@examples", f"@{ROOT}/examples") for word in words]
    args = parse_arguments(complete(here))
    device = Device(gpu(kind), False, scan, accumulate)
    tried = [given(args, gpus)]
    return plan(
        tried,
        load_recipes(args.recipes, args.recipe_set),
        vocabulary,
        device,
        Cluster(device.gpu, max(gpus, 2)),
    )[0]


def kind_of(name: str) -> str:
    """The planner's name of a GPU; an unknown one is an H200."""
    return next((kind for kind in ("h100", "h200", "b200") if kind.upper() in name), "h200")


def body(results: Path) -> str:
    """What goes between the page's markers."""
    parts = []
    for file in sorted(results.glob("plan_check-*.json")):
        data = json.loads(file.read_text())
        if data["machine"]["gpu"] != "none":  # tried out on a CPU
            parts += [_origin(data), _runs(data)]
    file = results / "model-h200.json"
    if file.is_file():
        data = json.loads(file.read_text())
        title = (
            "Forward and backward of four layers of Llama-3-8B, 4 sequences of 4096 tokens, "
            f"without an optimizer (`python benchmarks/model.py`), one {data['machine']['gpu']}:"
        )
        parts += [title, _layers(data)]
    return "\n\n".join(parts)


def _origin(data: dict) -> str:
    machine = data["machine"]
    return (
        f"{ITERATIONS} iterations of training on {data['gpus']} {machine['gpu']}, torch "
        f"{machine['torch']}, {machine['date']}, commit {machine['commit'][:12]}; the speed is the "
        f"median of the last {COUNTED}, the memory that of the rank which took most:"
    )


HEADINGS = ("GiB planned", "measured", "off", "ms a step, planned", "measured", "off")


def _runs(data: dict) -> str:
    lines, failed = [], []
    for row in data["rows"]:
        name = [row[key] for key in NAME]
        if "failed" in row:
            failed.append(f"- {', '.join(name)}: {row['failed']}")
            continue
        kind = kind_of(data["machine"]["gpu"])
        scan = row.get("scan", "mamba-ssm")
        found = planned(row["arguments"], row["gpus"], row["vocabulary"], kind, scan)
        cells = _beside(found, 2**30, max(row["memory_gib"]), row["tokens_per_s"])
        lines.append([*name, *cells])
    shown = table((*NAME, *HEADINGS), lines)
    return "\n\n".join([shown, "\n".join(["Failed:", "", *failed])] if failed else [shown])


def _layers(data: dict) -> str:
    lines = []
    for row in data["rows"]:
        contender = CONTENDERS[row["contender"]]
        if contender.build is not ours or "transformer_engine" in contender.arguments:
            continue
        words = [*MODEL, *contender.arguments]
        found = planned(words, 1, VOCABULARY, "h200", "mamba-ssm", accumulate=False)
        lines.append([row["contender"], *_beside(found, 1e9, row["peak_gb"], row["tokens_per_s"])])
    return table(("recipe", "GB planned", *HEADINGS[1:]), lines)


def _beside(found: Estimate, unit: float, memory: float, speed: float) -> list[str]:
    most, planned_s, measured_s = found.most_memory / unit, found.step, found.tokens / speed
    return [
        f"{most:.2f}", f"{memory:.2f}", f"{most / memory - 1:+.1%}",
        f"{1e3 * planned_s:.1f}", f"{1e3 * measured_s:.1f}", f"{planned_s / measured_s - 1:+.1%}",
    ]  # fmt: skip


CLUSTERS = {
    "hybrid-12b": ("131072", [
        ("h100", 736, "bf16"), ("h200", 736, "bf16"), ("h200", 736, "fp8-tile"),
        ("h200", 2944, "fp8-tile"), ("b200", 736, "mxfp8"), ("b200", 736, "nvfp4"),
        ("b200", 2944, "nvfp4"),
    ]),
    "llama3-405b": ("128256", [
        ("h100", 9216, "bf16"), ("h200", 9216, "bf16"), ("h200", 9216, "fp8-tile"),
        ("h200", 4608, "fp8-tile"), ("b200", 4608, "mxfp8"), ("b200", 4608, "nvfp4"),
        ("b200", 9216, "nvfp4"),
    ]),
}  # fmt: skip
"""Presets, their vocabulary, and what each is planned for: GPU, how many, recipe."""


def calculated(preset: str) -> str:
    """The fastest layout of a preset on each of its clusters."""
    vocabulary, clusters = CLUSTERS[preset]
    lines = []
    for kind, gpus, recipe in clusters:
        words = complete([f"@{ROOT}/examples/{preset}.args", "--precision-recipe", recipe])
        args = parse_arguments(words)
        device = Device(gpu(kind), needs_transformer_engine(gpu(kind).capability), "mamba-ssm")
        tried = [one for one in candidates(words, gpus, 8) if not isinstance(one, str)]
        found = plan(
            tried,
            load_recipes(args.recipes, args.recipe_set),
            int(vocabulary),
            device,
            Cluster(device.gpu, 8),
        )
        usable = usable_bytes(device)
        fitting = [one for one in found if one.most_memory <= usable]
        best = max(fitting, key=lambda one: one.tokens_per_second)
        run = args.train_iters * args.global_batch_size * args.seq_length
        layout = best.layout
        ranks = f"{layout.tensor} x {layout.pipeline} x {layout.data}"
        lines.append([
            f"{gpus} x {device.gpu.name.removeprefix('NVIDIA ')}", f"`{recipe}`", ranks,
            layout.virtual, f"{layout.micro_batch} x {layout.microbatches}", layout.recompute,
            f"{best.most_memory / 2**30:.0f}", f"{best.tokens_per_second / gpus:,.0f}",
            f"{best.utilisation(device):.1%}", f"{run / best.tokens_per_second / 86400:,.0f}",
        ])  # fmt: skip
    headings = ("GPUs", "recipe", "TP x PP x DP", "VP", "micro batch x number", "recomputed", "GiB",
                "tokens/s of a GPU", "MFU", "days")  # fmt: skip
    return table(headings, lines)


def write_page(document: Path, results: Path) -> None:
    """Replace what stands between the page's markers."""
    text = document.read_text(encoding="utf-8")
    made = {"measured": body(results)} | {preset: calculated(preset) for preset in CLUSTERS}
    for name, content in made.items():
        begin, end_ = f"<!-- {name}: {MADE} -->", f"<!-- /{name} -->"
        before, after = text.split(begin)[0], text.split(end_)[1]
        text = f"{before}{begin}\n\n{content}\n\n{end_}{after}"
    document.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", metavar="PREFIX")
    parser.add_argument("--tokenizer-model", metavar="DIR")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.add_argument("--gpus", type=int, help="at most so many (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=200, help="after which no case is begun (default: 200)"
    )
    parser.add_argument("--page", action="store_true", help="write docs/planning.md's tables")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "planning.md")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, metavar="DIR")
    args, more = parser.parse_known_args(argv)
    if args.page:
        write_page(args.document, args.results)
        return
    for name in ("data_path", "tokenizer_model", "output"):
        if getattr(args, name) is None:
            parser.error(f"--{name.replace('_', '-')} is missing")
    measure(args, more)


if __name__ == "__main__":
    main()
