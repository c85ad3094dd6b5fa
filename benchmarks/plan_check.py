"""Train a few models for a few iterations, to check the planner's memory and speed.

    python -m benchmarks plan_check --output benchmarks/results/plan_check-4xh200.json
    python docs/generate/planning.py

Started once on a host with 1, 2 or 4 GPUs: cases of cases/plan_check.yaml run in parallel on
different GPUs; those that need more GPUs than there are wait for another host. Tokens are random
(--mock-data). Other arguments go to the training script. The file is written after every case;
cases that it, or another plan_check-*.json of the same Megatron-LM in its folder, holds already are
not repeated. Without a GPU tiny twins of the models run on the CPU, to try the script out. The
second command writes what was measured into docs/research/plans.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import training_steps
from benchmarks.model import VOCABULARY
from benchmarks.records import current
from benchmarks.training_steps import HYBRID, OURS, cases_file, run_cases, tokens_of, train

ITERATIONS, COUNTED = 12, 6
"""Iterations of a run, and the last ones that count: the first ones compile kernels."""
PATIENCE_S = 120
DECLARED = cases_file("plan_check")
NAME = ("model", "recipe", "layout")


class Case(NamedTuple):
    """A model under a recipe in a layout, and the arguments that the planner takes as well."""

    model: str
    recipe: str
    layout: str
    arguments: list[str]

    @property
    def gpus(self) -> int:
        """Processes that it takes, a GPU each."""
        return 1 if self.layout == "1 GPU" else int(self.layout[2:])

    @property
    def name(self) -> str:
        """Name that no other case has."""
        return name_of(self._asdict())


def name_of(row: dict) -> str:
    """Return the name of a row's case."""
    return ", ".join(row[key] for key in NAME)


def cases(tiny: bool) -> list[Case]:
    """Return all of them, with presets as files relative to the repository."""
    return [
        _case(model, recipe, layout, tiny)
        for model, layouts in DECLARED["cases"].items()
        for layout, recipes in layouts.items()
        for recipe in recipes
    ]


def _case(model: str, recipe: str, layout: str, tiny: bool) -> Case:
    case, dimension = Case(model, recipe, layout, []), layout[:2]
    words = DECLARED["tiny" if tiny else "models"][model].split()
    words[0] = f"@examples/{words[0][1:]}.args"
    words += DECLARED["recipes"][recipe].split() + DECLARED["layouts"][layout].split()
    # As many microbatches as pipeline stages need to overlap.
    microbatches = (case.gpus if dimension == "DP" else 1) * (4 if dimension == "PP" else 2)
    has_size = "--micro-batch-size" in words
    size = int(words[words.index("--micro-batch-size") + 1]) if has_size else 1
    if not tiny:  # padded to the same vocabulary in every layout
        split = case.gpus if dimension == "TP" else 1
        words += ["--make-vocab-size-divisible-by", str(VOCABULARY // split)]
    words += ["--micro-batch-size", str(size), "--global-batch-size", str(size * microbatches)]
    return case._replace(arguments=[*words, *DECLARED["arguments"].split()])


def run_case(case: Case, devices: str | None, more: Sequence[str]) -> dict:
    """Train a case on these devices; return its row."""
    length = ["--train-iters", str(ITERATIONS), "--log-memory-interval", str(ITERATIONS)]
    words = [*case.arguments, *length, "--vocab-size", str(VOCABULARY), *more]
    script = HYBRID if case.model.startswith("hybrid") else OURS
    row = case._asdict() | {"gpus": case.gpus, "vocabulary": VOCABULARY}
    row |= train(script, words, case.gpus, devices, PATIENCE_S)
    if "error" not in row:
        row["tokens_per_s"] = round(1e3 * tokens_of(case.arguments) / row["median_ms"], 1)
    return row


def held_by_others(output: Path) -> set[str]:
    """Return the cases of this Megatron-LM in other machines' files of the output's folder."""
    files = set(output.parent.glob("plan_check-*.json")) - {output}
    return {name_of(row) for data in current(files) for row in data["rows"] if "error" not in row}


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the file and its neighbours lack, with other arguments for training."""
    parser = training_steps.cases_parser(__doc__, seconds=200)
    parser.add_argument("--gpus", type=int, help="largest number of GPUs to use (default: all)")
    args, more = parser.parse_known_args(argv)
    cuda = torch.cuda.is_available()
    number = torch.cuda.device_count() if cuda else 2
    number = min(number, args.gpus or number)
    held = held_by_others(args.output)
    lacking = {
        case.name: case
        for case in cases(tiny=not cuda)
        if case.gpus <= number and case.name not in held
    }
    run_cases(
        lacking, lambda case, devices: run_case(case, devices, more), args, number,
        list(map(str, range(number))), name_of,
    )  # fmt: skip
