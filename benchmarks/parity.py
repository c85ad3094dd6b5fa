"""Layouts against one process: losses and gradient norms from a common checkpoint, by recipe.

    python -m benchmarks parity --data-path data/stdlib --tokenizer-model data/tokenizer

One process trains 2 iterations in high precision. From that checkpoint every layout of
cases/parity.yaml goes on under every recipe, and so does the single process; the losses of all
iterations and the gradient norm of the first one are compared. A checkpoint, because layouts draw
other initial weights. ``compose.Composer`` makes the runs. `make parity` keeps the figures in
benchmarks/results/parity.json; docs/generate/parallelism.py makes a table of them.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import records
from benchmarks.compose import Composer, Results
from benchmarks.compose_features import BOUNDS, Bounds
from benchmarks.compose_runs import start_server
from benchmarks.records import short
from benchmarks.training_steps import cases_file

START_ITERATIONS = 2
DECLARED = cases_file("parity")


class Layout(NamedTuple):
    """Layout of a run: number of processes, arguments and model."""

    processes: int
    options: str
    model: str = "dense"

    @property
    def words(self) -> list[str]:
        """Arguments of the layout."""
        return self.options.format_map(DECLARED["arguments"]).split()

    @property
    def start(self) -> str:
        """Its checkpoint's name. Optimizers of the two kinds do not load each other's."""
        distributed = "--use-distributed-optimizer" in self.words
        return f"{self.model}-distributed-optimizer" if distributed else self.model

    @property
    def kind(self) -> str:
        """Effect on a layer: leaves it "whole", "split"s it in order, or "spread"s it.

        Experts are spread over ranks. So are the rows of a Mamba mixer's first layer, which makes
        five things: a rank has its share of each.
        """
        if "--expert-model-parallel-size" in self.words:
            return "spread"
        if "--tensor-model-parallel-size" in self.words:
            return "spread" if self.model == "hybrid" else "split"
        return "whole"


LAYOUTS = {name: Layout(*layout) for name, layout in DECLARED["layouts"].items()}


class Recipe(NamedTuple):
    """Its arguments, and the name of the bounds of each kind of layout."""

    options: str
    whole: str = "whole"
    split: str = "flips"
    spread: str = "spread"

    def bounds(self, kind: str) -> Bounds:
        """Return the largest differences of a kind of layout that count as parity."""
        return BOUNDS[getattr(self, kind)]


RECIPES = {name: Recipe(**declared) for name, declared in DECLARED["recipes"].items()}


class Run(NamedTuple):
    """A layout under a recipe, for ``compose.Composer``; the start of its model without one."""

    layout: str
    recipe: str
    made: Layout
    options: Recipe
    common: tuple[str, ...]
    iterations: int

    features = ()
    from_seed = saves = False
    judged = None

    @property
    def key(self) -> str:
        """Name that no other run has."""
        return f"{self.layout} {self.recipe}".strip()

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.made.processes

    def obstacle(self, gpus: int) -> None:
        """Return why this machine cannot run it: ``main`` refuses such layouts."""

    def reference(self) -> "Run":
        """Return the single process that it is compared with."""
        model = self.made.model
        return self._replace(layout=f"single-{model}", made=Layout(1, "", model))

    def start(self) -> "Run":
        """Return the run of one process whose checkpoint it loads."""
        optimizer = "{reshardable}" if self.made.start != self.made.model else ""
        made = Layout(1, optimizer, self.made.model)
        return self._replace(layout=self.made.start, recipe="", made=made, options=Recipe(""))

    def start_arguments(self, folder: Path) -> list[str]:
        """Return the arguments by which it writes its weights and optimizer into a folder."""
        return ["--train-iters", str(START_ITERATIONS), "--save", str(folder)]

    def length(self, folder: Path) -> list[str]:
        """Return the arguments by which it continues from a checkpoint.

        Megatron-LM's schedule of the weight decay, which is constant here, is as long as the run.
        It keeps dense layers and experts in one optimizer or in two: one process saves a state that
        two expert-parallel ranks do not load.
        """
        words = ["--train-iters", str(START_ITERATIONS + self.iterations), "--load", str(folder)]
        words += ["--override-opt-param-scheduler", "--resume-changed", "recipe"]
        return words + (["--no-load-optim"] if self.made.model == "experts" else [])

    def bounds(self) -> Bounds:
        """Return the largest differences from its reference that count as parity."""
        return self.options.bounds(self.made.kind)

    def arguments(self, recipe_file: Path) -> list[str]:
        """Return its command line, but for its length and folders."""
        model = DECLARED["models"][self.made.model].format_map(DECLARED["arguments"])
        words = f"{DECLARED['model']} {model} {self.options.options}".split()
        return [*words, *self.made.words, *self.common]

    def recipe_text(self) -> str:
        """Return nothing: recipes are named."""
        return ""

    def describe(self) -> dict[str, Any]:
        """Return the beginning of its cell."""
        return {"layout": self.layout, "recipe": self.recipe}


def runs_of(
    layouts: Mapping[str, Layout], recipes: Mapping[str, Recipe], common: Sequence[str], n: int
) -> list[Run]:
    """Return the runs of ``n`` iterations, with arguments that all have in common."""
    return [
        Run(layout, recipe, made, options, tuple(common), n)
        for layout, made in layouts.items()
        for recipe, options in recipes.items()
    ]


def complaint(cell: Mapping[str, Any]) -> str | None:
    """Return the error of a cell, if it has one."""
    norms = [norm for _, norm in cell.get("steps", {}).values()]
    if norms and min(norms) <= 0:
        return f"{cell['key']}: a gradient norm is {min(norms)}"
    if cell["outcome"] in ("equal", "parity"):
        return None
    figures = [f"{cell[name]:.1e}" for name in Bounds._fields if name in cell]
    return " ".join([f"{cell['key']}: {cell['outcome']}", *figures, cell["message"]]).strip()


def table(cells: Sequence[Mapping], layouts: Mapping[str, Layout]) -> str:
    """Tabulate the cells of a record: a row for each layout, a column for each recipe."""
    shown = {(c["layout"], c["recipe"]): (c["loss"], c["norm"]) for c in cells if "loss" in c}
    recipes = [name for name in RECIPES if any(recipe == name for _, recipe in shown)]
    lines = []
    for name, layout in layouts.items():
        row = [shown.get((name, recipe)) for recipe in recipes]
        if all(row):
            lines.append([name, layout.processes, *(short(*pair) for pair in row)])
    for effect in ("whole", "split", "spread"):
        bounds = (short(*RECIPES[name].bounds(effect)) for name in recipes)
        lines.append([f"bounds, {effect} |", *bounds])  # of any number of processes
    return records.markdown(["layout", "processes", *(f"`{name}`" for name in recipes)], lines)


def _parser() -> argparse.ArgumentParser:
    parser = records.parser(__doc__)
    parser.add_argument("--data-path", required=True, metavar="PREFIX")
    parser.add_argument("--tokenizer-model", required=True, metavar="DIR")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, metavar="NAME", help="or all")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES], metavar="NAME")
    parser.add_argument("--iterations", type=int, default=3, help="of each run (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: 1)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="keep all figures")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = _parser()
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    devices = gpus or 8  # processes on a CPU
    for name in args.layouts or ():
        if LAYOUTS[name].processes > devices:
            parser.error(f"--layouts {name}: {LAYOUTS[name].processes} GPUs, there are {devices}")
    names = args.layouts or [n for n, layout in LAYOUTS.items() if layout.processes <= devices]
    layouts = {name: LAYOUTS[name] for name in names}
    recipes = {name: RECIPES[name] for name in args.recipes}
    common = ["--data-path", args.data_path, "--tokenizer-model", args.tokenizer_model]
    runs = runs_of(layouts, recipes, common, args.iterations)
    context = start_server(bool(gpus))
    head = {"machine": records.description(gpus=gpus), "arguments": DECLARED}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        results = Results(args.output or work / "parity.json", head, again=True)
        Composer(context, results, work, gpus, 600, math.inf).compose(runs, args.jobs)
    cells = list(results.cells.values())
    print(table(cells, layouts))
    if complaints := [text for cell in cells if (text := complaint(cell))]:
        sys.exit("\n".join(complaints))
