"""Pairs of features against one process, under kinds of layers and recipes.

    python -m benchmarks compose --output benchmarks/results/compose.json --jobs 2
    python -m benchmarks compose --output benchmarks/results/compose-2xh100.json --jobs 14 \\
        --layers te

A tiny model is trained for a few steps with each pair of ``compose_features.FEATURES``, and with
each single feature; a feature with itself is a single feature. Two losses and the first gradient
norm are compared with one process that has the same model and recipe, from the same
weights. Megatron-FSDP, which does not load them, and quantized parameters are compared with the
distributed optimizer on the same ranks, and overlapped experts with expert parallelism. A run with
a save is also resumed from it, and compared with itself. With ``--seeds`` all are run with other
weights and data, for the bounds.

On a machine without GPUs local layers are examined, with FP32 compute and gloo, and pairs that need
a GPU are said to need one. On GPUs the model has BF16 weights. Cells that ``--output`` holds are
not run again. ``docs/generate/composition.py`` makes docs/research/composition.md of the files.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks import records
from benchmarks.compose_features import FEATURES, LAYERS, RECIPES, Run, runs_of
from benchmarks.compose_runs import Crews, Outcome, Steps, kind_of, read_steps, start_server

Cell = dict[str, Any]


class Results:
    """Cells and references of a file that is replaced after each new one.

    Args:
        file: the record.
        head: the record's head.
        again: ignore the cells that the file has.
    """

    def __init__(self, file: Path, head: dict[str, Any], again: bool = False) -> None:
        known = json.loads(file.read_text()) if file.is_file() and not again else {}
        self._file, self._lock, self._head = file, Lock(), head
        self.cells: dict[str, Cell] = {cell["key"]: cell for cell in known.get("cells", ())}
        self.references: dict[str, Cell] = {
            x["key"]: x for x in known.get("references", ()) if x["outcome"] == "ended"
        }

    def add(self, table: str, entry: Cell) -> None:
        """Keep an entry of "cells" or "references", and write the file."""
        with self._lock:
            getattr(self, table)[entry["key"]] = entry
            references = [self.references[key] for key in sorted(self.references)]
            cells = [self.cells[key] for key in sorted(self.cells)]
            records.write(self._file, self._head, references=references, cells=cells)


class Composer:
    """Runs of cells and references, in as many processes at once as asked for.

    Args:
        context: how processes are started.
        results: where they are kept.
        work: folder for checkpoints and logs.
        gpus: number of GPUs; 0 on a CPU.
        timeout: seconds for a run.
        end: time, by ``time.monotonic``, after which none is started.
        ranks_per_gpu: ranks of a run that may share a GPU.
    """

    def __init__(
        self, context: BaseContext, results: Results, work: Path, gpus: int, timeout: float,
        end: float, ranks_per_gpu: int = 1,
    ) -> None:  # fmt: skip
        self._results, self._work, self._starts = results, work, work / "starts"
        self._places, self._timeout, self._end = gpus * ranks_per_gpu, timeout, end
        self._crews = Crews(context, gpus)
        self._no_start: dict[str, Outcome] = {}

    def compose(self, runs: Sequence[Run], jobs: int) -> None:
        """Run what is not there yet: starts, then references, then cells."""
        runnable = []
        for run in runs:
            if run.key in self._results.cells:
                continue
            if (obstacle := run.obstacle(self._places)) is not None:
                self._results.add("cells", _cell(run, Outcome(*obstacle)))
            else:
                runnable.append(run)
        references = _unique(run.reference() for run in runnable)
        references = [r for r in references if r.key not in self._results.references]
        loading = [r for r in [*runnable, *references] if not r.from_seed]
        starts = [r for r in _unique(r.start() for r in loading) if not self._start(r).is_dir()]
        parts = (
            (self._make_start, starts), (self._add_reference, references),
            (self._add_cell, sorted(runnable, key=kind_of)),
        )  # fmt: skip
        try:
            with ThreadPoolExecutor(jobs) as pool:
                for function, part in parts:
                    list(pool.map(self._in_time(function), part))
        finally:
            self._crews.end()  # Python would wait for them

    def _in_time(self, function: Callable[[Run], None]) -> Callable[[Run], None]:
        return lambda run: function(run) if time.monotonic() < self._end else None

    def _start(self, run: Run) -> Path:
        return self._starts / run.start().key

    def _make_start(self, run: Run) -> None:
        folder = self._starts / f"{run.key}.partial"
        shutil.rmtree(folder, ignore_errors=True)
        outcome, _ = self._run(run, [run.start_arguments(folder)])
        if outcome.kind == "ended":
            folder.rename(self._starts / run.key)
        else:
            self._no_start[run.key] = outcome

    def _add_reference(self, run: Run) -> None:
        outcome, steps = self._run(run, [run.length(self._start(run))])
        entry = {"key": run.key, "outcome": outcome.kind, "message": outcome.message}
        self._results.add("references", entry | {"steps": steps[0] if steps else {}})

    def _add_cell(self, run: Run) -> None:
        began, length = time.monotonic(), run.length(self._start(run))
        phases = [length]
        if run.saves:
            half = str(run.iterations // 2)
            save = tempfile.mkdtemp(dir=self._work)
            resumed = ["--train-iters", str(run.iterations), "--load", save, "--ckpt-step", half]
            phases = [[*length, "--save", save, "--save-interval", half], resumed]
        outcome, steps = self._run(run, phases)
        if run.saves:
            shutil.rmtree(save, ignore_errors=True)
        cell = _cell(run, outcome)
        if outcome.kind == "ended":
            cell |= self._compare(run, steps)
        cell["seconds"] = round(time.monotonic() - began, 1)
        self._results.add("cells", cell)
        figures = [f"{cell[name]:.0e}" for name in ("loss", "norm", "resumed") if name in cell]
        print(cell["key"], cell["outcome"], *figures, cell["message"], flush=True)

    def _run(self, run: Run, phases: list[list[str]]) -> tuple[Outcome, list[Steps]]:
        """Return the outcome of phases, and the steps of each.

        A model that one process does not train is not tried in other layouts.
        """
        if not run.from_seed and run.start().key in self._no_start:
            return self._no_start[run.start().key], []
        logs = self._work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=logs, prefix=run.key.replace(" ", "-") + "-"))
        recipe = folder / "recipe.yaml"
        recipe.write_text(run.recipe_text())
        lines = [[*run.arguments(recipe), *phase] for phase in phases]
        timeout, output = self._timeout * len(phases), folder / "first"
        with self._crews.crew(run) as crew:
            outcome = crew.make(lines, output, timeout)
            made_others = crew.runs > 1
        if outcome.kind != "ended" and made_others:
            # Something that earlier runs left behind may be the reason.
            output = folder / "again"
            with self._crews.crew(run, new=True) as crew:
                outcome = crew.make(lines, output, timeout)
        steps = []
        if outcome.kind == "ended":
            steps = [read_steps(_folder_of(line, output / str(i))) for i, line in enumerate(lines)]
            shutil.rmtree(folder)
        return outcome, steps

    def _compare(self, run: Run, steps: list[Steps]) -> Cell:
        """Return a cell's distances from its reference, and of its resumed part from itself."""
        reference = self._results.references.get(run.reference().key)
        if reference is None or reference["outcome"] != "ended":
            reason = "none" if reference is None else reference["message"]
            return {"outcome": "no reference", "message": f"{run.reference().key}: {reason}"}
        trained = steps[0]
        known = {int(step): tuple(values) for step, values in reference["steps"].items()}
        first, *_ = judged = sorted(known)[: run.judged]
        differences: Cell = {
            "loss": _gap((trained[step][0], known[step][0]) for step in judged),
            "norm": _gap([(trained[first][1], known[first][1])]),
        }
        bounds = dict(zip(("loss", "norm"), run.bounds(), strict=True))
        if run.saves:
            later = steps[1]
            differences["resumed"] = _gap(
                pair for step in later for pair in zip(later[step], trained[step], strict=True)
            )
            bounds["resumed"] = bounds["norm"] if run.on_gpu else 0
        within = all(differences[name] <= bound for name, bound in bounds.items())
        outcome = "parity" if within else "apart"
        if trained == known and not differences.get("resumed"):
            outcome = "equal"
        return differences | {"bounds": run.bounds(), "steps": trained, "outcome": outcome}


def _folder_of(line: Sequence[str], folder: Path) -> Path:
    return Path(line[line.index("--save") + 1]) if "--save" in line else folder


def _gap(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the largest relative difference; infinity for values that are not finite."""
    gaps = [abs(a - b) / abs(b) if b else abs(a) for a, b in pairs]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)


def _cell(run: Run, outcome: Outcome) -> Cell:
    cell = {"key": run.key, **run.describe(), "ranks": run.ranks}
    return cell | {"outcome": outcome.kind, "message": outcome.message}


def _unique(runs: Iterable[Run]) -> list[Run]:
    return list({run.key: run for run in runs}.values())


def _parser() -> argparse.ArgumentParser:
    parser = records.parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["local"], metavar="NAME")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="NAME")
    parser.add_argument(
        "--features", nargs="+", choices=FEATURES, default=[*FEATURES], metavar="NAME",
        help="pairs with at least one of these",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[None], metavar="N",
        help="of models and data: how far a pair's losses move by chance",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument(
        "--ranks-per-gpu", type=int, default=1, metavar="N", help="ranks of a run that share a GPU"
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a run")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after these")
    parser.add_argument("--work", type=Path, help="folder for checkpoints and logs of failed runs")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the pairs that the command line names and print how many ended how."""
    begin, parser = time.monotonic(), _parser()
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count()  # by NVML: it does not initialize CUDA
    context = start_server(bool(gpus))
    if "te" in args.layers and not gpus:
        parser.error("--layers te: Transformer Engine needs a GPU")
    runs = [run._replace(seed=seed) for layers in args.layers for recipe in args.recipes
            for run in runs_of(layers, recipe, bool(gpus))
            if set(args.features) & set(run.features) for seed in args.seeds]  # fmt: skip
    shared = {"ranks_per_gpu": args.ranks_per_gpu}
    results = Results(args.output, {"machine": records.description(gpus=gpus) | shared})
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        composer = Composer(
            context, results, work, gpus, args.timeout, begin + args.seconds, args.ranks_per_gpu
        )
        composer.compose(runs, args.jobs)
    cells = [results.cells[run.key] for run in runs if run.key in results.cells]
    print(dict(Counter(cell["outcome"] for cell in cells)), f"of {len(runs)}")
    if len(cells) < len(runs):
        sys.exit(f"{len(runs) - len(cells)} cells are left: start the same command again")
