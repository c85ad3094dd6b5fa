"""Layouts against one process: losses and gradient norms from a common checkpoint, by recipe.

    python benchmarks/parity.py --data-path data/stdlib --tokenizer-model data/tokenizer

One process trains 2 iterations in high precision. From that checkpoint every layout goes on under
every recipe, and so does the single process; the losses of all iterations and the gradient norm of
the first one are compared. A checkpoint, because layouts draw other initial weights. `make parity`
keeps the figures in benchmarks/results/parity.json; docs/generate/parallelism.py makes a table of
them.

On a GPU host `--against` compares the losses with those of such a file, cell by cell, if both began
at the same checkpoints: copy the folder of `--start`.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_lowbit.analysis.machine import machine

ROOT = Path(__file__).parents[1]
START_ITERATIONS = 2

# 2 tensor-parallel ranks hold whole blocks of 128 of every weight, 4 ranks whole blocks of 64. 4
# microbatches, so that 2 data-parallel ranks still add up gradients. Nothing is clipped: torch's
# norm sums in FP32 on a CPU, which for a million elements is off by 1e-5, another way in every
# layout, and clipping would hand that on to later iterations.
MODEL = """
    --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --swiglu
    --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8
    --lr 1e-3 --clip-grad 1e6 --lr-decay-iters 100 --log-interval 1
    --eval-iters 0 --eval-interval 1000 --save-interval 1000
"""
UNTIED = "--untie-embeddings-and-output-weights"
ROPE = f"{UNTIED} --position-embedding-type rope"
MODELS = {
    "dense": f"{ROPE} --num-layers 4",
    "tied": "--position-embedding-type rope --num-layers 4",
    "experts": f"{ROPE} --num-layers 2 --num-experts 4 --moe-ffn-hidden-size 256 "
    "--moe-aux-loss-coeff 0.01 --moe-router-dtype fp32",
    "latent": f"{ROPE} --num-layers 4 --multi-latent-attention --q-lora-rank 256 "
    "--kv-lora-rank 192 --qk-head-dim 64 --qk-pos-emb-head-dim 64 --v-head-dim 64",
    "mtp": f"{ROPE} --num-layers 4 --mtp-num-layers 1",
    "hybrid": f"{UNTIED} --hybrid-layer-pattern M-M*-M-M --mamba-state-dim 32 "
    "--mamba-head-dim 32 --mamba-num-groups 4 --position-embedding-type none",
}


class Layout(NamedTuple):
    """Layout of a run: number of processes, arguments and model."""

    processes: int
    options: str
    model: str = "dense"

    @property
    def start(self) -> str:
        """Its checkpoint's name. Optimizers of the two kinds do not load each other's."""
        distributed = "--use-distributed-optimizer" in self.options
        return f"{self.model}-distributed-optimizer" if distributed else self.model

    @property
    def kind(self) -> str:
        """Effect on a layer: leaves it "whole", "split"s it in order, or "spread"s it.

        Experts are spread over ranks. So are the rows of a Mamba mixer's first layer, which makes
        five things: a rank has its share of each.
        """
        if "--expert-model-parallel-size" in self.options:
            return "spread"
        if "--tensor-model-parallel-size" in self.options:
            return "spread" if self.model == "hybrid" else "split"
        return "whole"


TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP2 = f"{TP2} --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RESHARDABLE = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "recompute-full": Layout(1, RECOMPUTE),
    "recompute-selective": Layout(1, "--recompute-granularity selective"),
    "TP2": Layout(2, TP2),
    "TP2+SP": Layout(2, SP2),
    "PP2": Layout(2, PP2),
    "PP2-interleaved": Layout(2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "PP2-recompute": Layout(2, f"{PP2} {RECOMPUTE}"),
    "PP2-tied": Layout(2, PP2, "tied"),
    "DP2": Layout(2, ""),
    "DP2-distributed": Layout(2, DISTRIBUTED),
    "EP2": Layout(2, EP2, "experts"),
    "TP2+SP-PP2": Layout(4, f"{SP2} {PP2}"),
    "TP2-DP2-distributed": Layout(4, f"{TP2} {DISTRIBUTED}"),
    "PP2-DP2": Layout(4, PP2),
    "TP4+SP": Layout(4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "EP2-TP2+SP": Layout(4, f"{EP2} {SP2}", "experts"),
    "EP2-PP2": Layout(4, f"{EP2} {PP2}", "experts"),
    "PP2-latent": Layout(2, PP2, "latent"),
    "TP2+SP-mtp": Layout(2, SP2, "mtp"),
    "PP2-mtp": Layout(2, PP2, "mtp"),
    "TP2+SP-hybrid": Layout(2, SP2, "hybrid"),
    "PP2-hybrid": Layout(2, PP2, "hybrid"),
    "TP2-DP2-distributed-hybrid": Layout(4, f"{TP2} {DISTRIBUTED}", "hybrid"),
}


class Bounds(NamedTuple):
    """Largest relative differences: the losses of all iterations, the first gradient norm."""

    loss: float
    norm: float


# Sums in another order, and what torch's norm is off by.
SUMS = Bounds(1e-6, 1e-4)
# The first iteration quantizes to the same bits, but gradients are added up in another order. That
# moves a few values over a rounding threshold in later iterations, each a whole step, which moves
# many in the layers around it: a relative change of 1e-7 of one process's own first gradients
# changes the third gradient norm of mxfp4-backward by 1%.
WHOLE = Bounds(1e-4, 1e-4)
# A sum split over ranks does so in the first iteration already. Moving one process's own norm
# weights by 1e-7 moves the first gradient norm of fp8-tile by up to 7e-4 and of mxfp4-backward by
# 3e-4 (12 draws); of nvfp4-group by 1.7e-3 (24 draws) and of fp8-delayed, where one flip in the
# largest element moves the whole tensor, by 1.8e-3 (12 draws).
FLIPS, LARGE_FLIPS = Bounds(5e-4, 1e-3), Bounds(5e-4, 5e-3)
# Other scales or random numbers, by design: noise as large as quantization's own.
OTHER = Bounds(2e-3, 3e-2)


class Recipe(NamedTuple):
    """Its arguments, and the bounds of each kind of layout."""

    options: str
    whole: Bounds = WHOLE
    split: Bounds = FLIPS
    spread: Bounds = OTHER


NVFP4 = "--precision-recipe nvfp4 --recipe-set bf16_blocks=none"
GROUP = "--recipe-set tensor_scale=group"
# A short history, so that scales come from it before the run ends.
DELAYED = f"--precision-recipe fp8-delayed --recipe-set amax_history.length=1 {GROUP}"
RECIPES = {
    "bf16": Recipe("--precision-recipe bf16", SUMS, SUMS, SUMS),
    "nvfp4-group": Recipe(f"{NVFP4} {GROUP}", split=LARGE_FLIPS),
    # Other tensor scales: another draw of the noise that moves this norm by 2% from bf16's.
    "nvfp4-shard": Recipe(NVFP4, split=Bounds(2e-3, 5e-2)),
    "mxfp4-backward": Recipe("--precision-recipe mxfp4-backward"),
    "fp8-tile": Recipe("--precision-recipe fp8-tile"),
    "fp8-delayed": Recipe(DELAYED, split=LARGE_FLIPS),
}


@dataclass
class Cell:
    """Result of a layout's run under a recipe, and its distance from other runs."""

    layout: str
    recipe: str
    losses: list[float]
    norms: list[float]
    difference: Bounds | None = None
    against: Bounds | None = None

    def distance(self, losses: Sequence[float], norms: Sequence[float]) -> Bounds:
        """Return relative differences from another run."""
        pairs = zip(self.losses, losses, strict=True)
        loss = max(abs(here - there) / abs(there) for here, there in pairs)
        return Bounds(loss, abs(self.norms[0] - norms[0]) / norms[0])

    def complaint(self, layouts: Mapping[str, Layout], recipes: Mapping[str, Recipe]) -> str | None:
        """Return the error of a cell, if it has one."""
        if min(self.norms) <= 0:
            return f"{self.layout} {self.recipe}: a gradient norm is {min(self.norms)}"
        if self.difference is None:
            return None
        bounds = getattr(recipes[self.recipe], layouts[self.layout].kind)
        for name, difference, bound in zip(Bounds._fields, self.difference, bounds, strict=True):
            if not difference <= bound:
                return f"{self.layout} {self.recipe}: {name} off by {difference:.1e} > {bound:.0e}"
        return None


def measure(
    layouts: Mapping[str, Layout],
    recipes: Mapping[str, Recipe],
    common: Sequence[str],
    iterations: int,
    start: Path,
    work: Path,
) -> list[Cell]:
    """Return all cells, the single process's first; ``start`` gets the checkpoints that it lacks.

    Runs with one number of processes share a job: much of the time of a run of its own would go
    into importing torch and compiling. ``common`` are arguments of all runs.
    """
    models = dict.fromkeys(layout.model for layout in layouts.values())
    layouts = {f"single-{model}": Layout(1, "", model) for model in models} | dict(layouts)
    starts = {layout.start: layout for layout in layouts.values()}
    jobs = {
        1: [_start(x, common, start) for x in starts.values() if not (start / x.start).is_dir()]
    }
    # Megatron-LM's schedule of the weight decay, which is constant here, is as long as the run.
    length = (
        "--train-iters", str(START_ITERATIONS + iterations), "--override-opt-param-scheduler",
    )  # fmt: skip
    for name, layout in layouts.items():
        for recipe, (options, *_) in recipes.items():
            arguments = [*_arguments(layout), *layout.options.split(), *options.split(), *common]
            arguments += [*length, "--load", str(start / layout.start)]
            arguments += ["--resume-changed", "recipe"]
            if layout.model == "experts":
                # Megatron-LM keeps dense layers and experts in one optimizer or in two: one process
                # saves a state that two expert-parallel ranks do not load.
                arguments.append("--no-load-optim")
            save = work / f"{name} {recipe}"
            run = {"arguments": [*arguments, "--save", str(save)], "save": str(save), "keep": False}
            jobs.setdefault(layout.processes, []).append(run)
    for processes, runs in sorted(jobs.items()):
        _launch(processes, runs, work)
    cells = [_cell(name, recipe, work) for name in layouts for recipe in recipes]
    single = {(cell.layout, cell.recipe): cell for cell in cells}
    for cell in cells[len(models) * len(recipes) :]:
        other = single[f"single-{layouts[cell.layout].model}", cell.recipe]
        cell.difference = cell.distance(other.losses, other.norms)
    return cells


def _arguments(layout: Layout) -> list[str]:
    return shlex.split(MODEL + MODELS[layout.model])


def _start(layout: Layout, common: Sequence[str], start: Path) -> dict:
    """Return the run that makes a layout's checkpoint."""
    optimizer = RESHARDABLE if layout.start != layout.model else []
    save = str(start / layout.start)
    length = ["--train-iters", str(START_ITERATIONS), "--save", save]
    return {"arguments": [*_arguments(layout), *optimizer, *common, *length], "save": save,
            "keep": True}  # fmt: skip


def _cell(layout: str, recipe: str, work: Path) -> Cell:
    lines = (work / f"{layout} {recipe}" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "lm_loss" in step]
    losses, norms = ([step[name] for step in steps] for name in ("lm_loss", "grad_norm"))
    return Cell(layout, recipe, losses, norms)


def _launch(processes: int, runs: list[dict], work: Path) -> None:
    job = work / f"{processes}.json"
    job.write_text(json.dumps(runs))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, __file__, "--worker", str(job)]
    # One thread: threads divide sums, and with them their last bits.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with job.with_suffix(".log").open("w") as log:
        if subprocess.run(command, stdout=log, env=environment, check=False).returncode:
            sys.exit(f"error: a run on {processes} processes failed")


def work_off(job: Path) -> None:
    """Run one process's part in a job's runs, one after another."""
    from megatron_lowbit.megatron.pretrain import main as pretrain

    for run in json.loads(job.read_text()):
        begin = time.monotonic()
        pretrain(run["arguments"])
        if os.environ["RANK"] == "0":
            save = Path(run["save"])
            print(f"{save.name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
            if not run["keep"]:
                for checkpoint in save.glob("iter_*"):
                    shutil.rmtree(checkpoint)


def table(cells: Sequence[Cell], layouts: Mapping[str, Layout], part: str = "difference") -> str:
    """Tabulate differences: a row for each layout, a column for each recipe."""
    recipes = list(dict.fromkeys(cell.recipe for cell in cells))
    shown = {(cell.layout, cell.recipe): getattr(cell, part) for cell in cells}
    lines = ["| layout | processes | " + " | ".join(f"`{name}`" for name in recipes) + " |"]
    lines.append("| --- " * (len(recipes) + 2) + "|")
    for name in dict.fromkeys(layout for layout, _ in shown):
        row = [shown[name, recipe] for recipe in recipes]
        if all(row):
            processes = str(layouts[name].processes if name in layouts else 1)
            lines.append(f"| {' | '.join((name, processes, *map(_short, row)))} |")
    for kind in ("whole", "split", "spread") if part == "difference" else ():
        bounds = [_short(getattr(RECIPES[name], kind)) for name in recipes]
        lines.append(f"| bounds, {kind} | | {' | '.join(bounds)} |")
    return "\n".join(lines)


def _short(pair: Bounds) -> str:
    return " / ".join("0" if x == 0 else f"{x:.0e}".replace("e-0", "e-") for x in pair)


def compare(cells: Sequence[Cell], file: Path) -> dict:
    """Set the cells' distances from another machine's; returns which machine that was."""
    other = json.loads(file.read_text())
    known = {(cell["layout"], cell["recipe"]): cell for cell in other["cells"]}
    for cell in cells:
        if (there := known.get((cell.layout, cell.recipe))) is not None:
            if len(there["losses"]) != len(cell.losses):
                sys.exit(f"error: --against {file}: {len(there['losses'])} iterations a run there")
            cell.against = cell.distance(there["losses"], there["norms"])
    return other["machine"]


def write(file: Path, head: dict, cells: Sequence[Cell]) -> None:
    """Write the JSON, a line for each cell."""
    known = [{k: v for k, v in asdict(cell).items() if v is not None} for cell in cells]
    lines = ",\n".join(f"  {json.dumps(cell)}" for cell in known)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n{lines}\n ]\n}}\n')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", required=True, metavar="PREFIX")
    parser.add_argument("--tokenizer-model", required=True, metavar="DIR")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, metavar="NAME", help="or all")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES], metavar="NAME")
    parser.add_argument("--iterations", type=int, default=3, help="of each run (default: 3)")
    parser.add_argument("--start", type=Path, metavar="DIR", help="checkpoints: read, or made here")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="keep all figures")
    parser.add_argument("--against", type=Path, metavar="FILE.json", help="another machine's")
    parser.add_argument(
        "--report-only", action="store_true",
        help="exceed bounds without an error: for --extra --bf16, which has none",
    )  # fmt: skip
    parser.add_argument(
        "--extra", nargs=argparse.REMAINDER, default=[], metavar="ARGUMENT",
        help="all that follows goes to every run, such as --bf16",
    )  # fmt: skip
    return parser


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Layout]:
    """Return the layouts asked for, or all that this machine has the devices for."""
    devices = torch.cuda.device_count() or 4  # processes on a CPU
    for name in args.layouts or ():
        if LAYOUTS[name].processes > devices:
            parser.error(f"--layouts {name}: {LAYOUTS[name].processes} GPUs, there are {devices}")
    names = args.layouts or [n for n, layout in LAYOUTS.items() if layout.processes <= devices]
    return {name: LAYOUTS[name] for name in names}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, keep them; exit with 1 where a bound is exceeded."""
    parser = _parser()
    args = parser.parse_args(argv)
    layouts, begin = _chosen(parser, args), time.monotonic()
    if args.iterations < 1:
        parser.error("--iterations: at least 1")
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    common = ["--data-path", args.data_path, *tokenizer, args.tokenizer_model, *args.extra]
    with tempfile.TemporaryDirectory() as work:
        start = args.start or Path(work) / "start"
        recipes = {name: RECIPES[name] for name in args.recipes}
        cells = measure(layouts, recipes, common, args.iterations, start, Path(work))
    count = torch.cuda.device_count()
    gpus = f"{count} x {torch.cuda.get_device_name()}" if count else "none"
    head = {
        "machine": machine(gpus=gpus, megatron_core=version("megatron-core")),
        "seconds": round(time.monotonic() - begin),
        "arguments": {"model": MODEL.split(), "models": MODELS, "extra": args.extra},
        "layouts": {name: layout._asdict() for name, layout in layouts.items()},
        "recipes": {name: recipe._asdict() for name, recipe in recipes.items()},
    }
    print(table(cells, layouts))
    if args.against is not None:
        head["against"] = compare(cells, args.against)
        print(table(cells, layouts, "against"))
    if args.output is not None:
        write(args.output, head, cells)
    complaints = [text for cell in cells if (text := cell.complaint(layouts, recipes))]
    if complaints and not args.report_only:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        from megatron_lowbit.errors import exit_on_user_error

        exit_on_user_error(lambda: work_off(Path(sys.argv[2])))
    main()
