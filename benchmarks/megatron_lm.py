"""Whole training steps of Megatron-LM, with and without recipes, in several layouts.

    python -m benchmarks megatron_lm --gpus 2 --output benchmarks/results/megatron_lm-2xh100.json

Each case of cases/megatron_lm.yaml is a run of its own: ``pretrain_gpt.py``, or
``examples/own_script.py`` without a recipe, which is Megatron-LM itself. Its time is the median of
the settled steps. A case that ends in an error is kept with the error's line. The output gets the
cases that it lacks. On CPUs (``--cpu``) it is for trying the script out.
"""

import argparse
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import training_steps
from benchmarks.training_steps import OURS, UPSTREAM, cases_file, read_metrics, run_cases, train

DECLARED = cases_file("megatron_lm")
MODEL, COMMON = DECLARED["model"].split(), DECLARED["common"].split()


class Case(NamedTuple):
    """A run: its name, its script, its own arguments.

    ``resumed``: the run is made once whole and once more from its middle, and the losses are
    compared.
    """

    name: str
    script: str
    arguments: list[str]
    resumed: bool = False


def _case(name: str, declared: str, resumed: bool = False) -> Case:
    script, *words = declared.format_map(DECLARED["arguments"]).split()
    return Case(name, {"ours": OURS, "upstream": UPSTREAM}[script], words, resumed)


CASES = [
    *(
        _case(f"{layout} {how}{name}", f"{declared} {arguments} {more}")
        for layout, arguments in DECLARED["with_graphs"]["layouts"].items()
        for name, declared in DECLARED["with_graphs"]["cases"].items()
        for how, more in (("", ""), ("graphs ", "{graphs}"))
    ),
    *(_case(*declared) for declared in DECLARED["cases"].items()),
    *(_case(*declared, resumed=True) for declared in DECLARED["resumed"].items()),
]


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Return a case's figures, or its error."""
    if not case.resumed:
        return steps_of(case, args, [])
    half = args.iterations // 2
    with tempfile.TemporaryDirectory() as folder:
        unbroken, parts = Path(folder, "whole"), Path(folder, "parts")
        first = steps_of(case, args, _checkpoints(unbroken, half))
        if "error" in first:
            return first
        iteration = f"iter_{half:07d}"
        shutil.copytree(unbroken / iteration, parts / iteration)
        (parts / "latest_checkpointed_iteration.txt").write_text(str(half))
        second = steps_of(case, args, _checkpoints(parts, 1000))
        if "error" in second:
            return second
        # Not from the console, where the second line after a start is the mean of two steps.
        losses = [
            {x["iteration"]: x["lm_loss"] for x in read_metrics(run)} for run in (unbroken, parts)
        ]
    after = [i for i in losses[0] if i > half]
    gaps = [abs(losses[0][i] - losses[1].get(i, math.inf)) for i in after]
    return {**first, "resumed_losses": len(gaps), "largest_difference": max(gaps)}


def _checkpoints(folder: Path, interval: int) -> list[str]:
    """Return the arguments that go on from a folder's checkpoint and save into it."""
    return ["--save", str(folder), "--save-interval", str(interval), "--load", str(folder)]


def steps_of(case: Case, args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Run a case once with additional arguments."""
    model = DECLARED["tiny"].split() if args.cpu else MODEL
    iterations = ["--train-iters", str(args.iterations)]
    words = [*model, *COMMON, *case.arguments, *iterations, *more]
    return train(case.script, words, args.gpus)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases; the file is written after each."""
    parser = training_steps.cases_parser(__doc__, seconds=570)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--iterations", type=int, default=26)
    args = parser.parse_args(argv)
    cases = {case.name: case for case in CASES}
    run_cases(cases, lambda case, _: run_case(case, args), args, args.gpus, model=MODEL)
