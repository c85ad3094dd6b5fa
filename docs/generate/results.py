"""Store the longer runs, and write docs/results.md, its pictures and README's.

    python -m benchmarks flagship --output benchmarks/results/flagship-h100.json
    lowbit-study run examples/studies/flagship.yaml --output runs/flagship --gpus 0 -- ...
    python docs/generate/results.py runs/flagship

Steps are read from benchmarks/results/flagship-h100*.json and flagship-h200*.json. Finished runs of
a folder go into benchmarks/results/flagship-runs.json and replace those of the same name and seed;
without a folder the page is written from that file. The page names missing measurements; only the
H100's steps that README's picture shows are required.
"""

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from leaderboard import (
    finished_runs,
    kept_of,
    merge,
    paired_gaps,
    provenance,
    shown_gap,
    split,
)  # fmt: skip
from render import RESULTS, ROOT, parser, recipe_section, render, replace_sections
from results_pictures import Bars, draw_curves, draw_steps, is_own

from megatron_lowbit.analysis.loss_curve import LossCurve
from megatron_lowbit.study.definition import Job, read_study, training_words

# isort: split
from benchmarks import flagship

KINDS = ("h100", "h200")
STUDY = ROOT / "examples" / "studies" / "flagship.yaml"
BF16, OWN_FP8, TENSORWISE = (
    f"Megatron-LM {name}" for name in ("BF16", "FP8 blockwise", "FP8 tensorwise")
)
NATIVE = f"{TENSORWISE}, native fused loss"
"""Megatron-LM's tensorwise FP8 as fast as it is without this project."""
SAME_LOSS, BF16_SAME_LOSS = "× tensorwise, same loss", "× BF16, same loss"
BASES = {
    "× BF16": BF16,
    BF16_SAME_LOSS: BF16,
    "× blockwise": OWN_FP8,
    "× tensorwise, native fused loss": NATIVE,
    SAME_LOSS: TENSORWISE,
}
"""Precisions that rows are compared with, by the headings of the ratios.

They have the losses that their names say; under "same loss" the loss is the row's own. A model has
one column of BF16: that of the same loss, if the default loss was not measured.
"""
PICTURED, TIMES = "llama-8b", ("× BF16", "× tensorwise, native fused loss")
"""Model whose steps in graphs the pictures show, and the ratios at their bars."""
MXFP8, MXFP8_OUTPUT = "mxfp8, own loss", "mxfp8 with its output layer, own loss"
RECOMMENDED = {
    "mxfp8": "pretraining on H100 and H200",
    "mxfp8 with its output layer": "faster, with a larger loss gap",
    "fp8-tile": "pretraining with the blocks of DeepSeek-V3, which servers load directly",
    "torchao-v2-late-bf16": "the FP4 recipe with the smallest loss gap",
    "nvfp4": "NVIDIA's NVFP4 pretraining",
}
"""Recipes of README's table, and their use."""
CHOICES = (BF16, NATIVE, f"{TENSORWISE}, own loss", MXFP8, MXFP8_OUTPUT)
"""Precisions of README's picture."""
NOISE = 0.01
"""Differences of medians below this share are not told from noise."""
ORDER = list(flagship.DECLARED["precisions"])
DATA = "--data-path data/linux --tokenizer-model data/linux-tokenizer"


class Steps(NamedTuple):
    """Rows of a kind of GPU by model, precision and graphs, and the machine that they are from.

    ``times`` is the file of GPU time by kind of kernel, where there is one.
    """

    rows: dict[tuple[str, str, bool], dict]
    times: dict | None
    machine: dict
    models: dict[str, str]
    peak: float

    def of(self, model: str, failed: bool | None = None) -> list[dict]:
        """Return a model's rows, all or only those that did or did not fail, in ORDER.

        Rows in graphs come first.
        """
        place = {precision: i for i, precision in enumerate(ORDER)}
        rows = [row for row in self.rows.values() if row["model"] == model]
        rows.sort(key=lambda row: (not row["graphs"], place.get(row["precision"], len(place))))
        return [row for row in rows if failed in (None, "error" in row)]

    def bases(self, model: str) -> list[str]:
        """Return the headings of BASES that have a ratio for a row of a model."""
        rows = self.of(model, failed=False)
        done = {row["precision"] for row in rows}
        return [
            heading
            for heading, base in BASES.items()
            if (base in done and heading != BF16_SAME_LOSS)
            or (base not in done and any(self.ratio(row, heading) is not None for row in rows))
        ]

    def ratio(self, row: dict, heading: str) -> float | None:
        """Return the speed of a row relative to a precision of BASES."""
        base = BASES[heading]
        if heading.endswith("same loss"):
            _, comma, loss = row["precision"].partition(", ")
            base += comma + loss
        other = self.rows.get((row["model"], base, row["graphs"]), {})
        return row["tokens_per_s"] / other["tokens_per_s"] if "tokens_per_s" in other else None

    def figures(self, model: str) -> list[list[object]]:
        """Return the cells of a model's rows that ended well."""
        return [
            [
                f"{row['precision']}{', graphs' if row['graphs'] else ''}",
                f"{row['median_ms']:.0f} ({row['fastest_ms']:.0f})",
                f"{row['tokens_per_s']:,}",
                f"{row['tflop_per_s']:.0f}",
                f"{row['mfu']:.1%}",
                f"{row['peak_gib']:.1f}",
                *(self.ratio(row, heading) for heading in self.bases(model)),
            ]
            for row in self.of(model, failed=False)
        ]

    def slower_than(self, heading: str) -> list[str]:
        """Name the rows of recipes that are slower, by more than noise, than one of BASES."""
        models = [model for model in self.models if heading in self.bases(model)]
        recipes = [
            row
            for row in self.rows.values()
            if row["model"] in models and not is_own(row["precision"])
        ]
        ratios = {row["case"]: self.ratio(row, heading) for row in recipes if "error" not in row}
        return [
            f"{case} ({x:.2f})" for case, x in ratios.items() if x is not None and x < 1 - NOISE
        ]

    def pictured(self) -> dict[str, dict]:
        """Return the rows of PICTURED in graphs by precision."""
        rows = self.of(PICTURED, failed=False)
        return {row["precision"]: row for row in rows if row["graphs"]}

    def choices(self) -> dict[str, dict]:
        """Return the rows of CHOICES; none if one is missing."""
        rows = self.pictured()
        return {name: rows[name] for name in CHOICES} if rows.keys() >= set(CHOICES) else {}

    def gpu_times(self) -> list[list[object]]:
        """Return each profiled case, its commit and the milliseconds of ``kinds``."""
        return [
            [row["case"], row["commit"][:7], *map(row["milliseconds"].get, self.kinds)]
            for row in self.timed
        ]

    @property
    def kinds(self) -> list[str]:
        """Kinds of kernels of any profiled case."""
        return list(dict.fromkeys(kind for row in self.timed for kind in row["milliseconds"]))

    @property
    def timed(self) -> list[dict]:
        """Rows of the cases that were profiled."""
        return [row for row in self.times["rows"] if "error" not in row] if self.times else []


def read_steps(results: Path, kind: str) -> Steps | None:
    """Read the files of a kind of GPU; None where there are none.

    Raises:
        SystemExit: one is of another GPU, or none holds a row that ended well.
    """
    files = sorted(results.glob(f"flagship-{kind}*.json"))
    if not files:
        return None
    rows: dict[tuple[str, str, bool], dict] = {}
    for file in files:
        data = json.loads(file.read_text())
        if kind.upper() not in data["machine"]["gpu"]:
            raise SystemExit(f"error: {file}: measured on {data['machine']['gpu']}")
        for row in data["rows"]:
            key = row["model"], row["precision"], row["graphs"]
            if "error" not in row or key not in rows:
                rows[key] = row
    if all("error" in row for row in rows.values()):
        raise SystemExit(f"error: {files[0]}: no case ended well")
    file = results / f"gpu-time-{kind}.json"
    times = json.loads(file.read_text()) if file.is_file() else None
    return Steps(rows, times, data["machine"], data["models"], data["peak_tflops"])


def kept_run(state: dict[str, Any], curve: LossCurve) -> dict[str, Any]:
    """Return the stored values of a run: the leaderboard's, its validation and its speed.

    Raises:
        SystemExit: it has no validation, or no speed.
    """
    speed = float(np.nanmedian(curve.speeds)) if np.isfinite(curve.speeds).any() else math.nan
    if math.isnan(speed) or not len(curve.validation_losses):
        raise SystemExit(f"error: {state['name']}, seed {state['seed']}: no validation or no speed")
    tokens_per_step = curve.tokens[-1] / curve.iterations[-1]
    job = Job(state["name"], state["seed"], Path(), ["python", *state["command"]])
    recipe, rest = split(training_words(job))
    given = ["--seed", str(state["seed"]), *DATA.split(), "--save", f"runs/{state['name']}"]
    validation = zip(curve.validation_iterations, curve.validation_losses, strict=True)
    return {
        **kept_of(state, curve),
        "command": shlex.join(["lowbit-pretrain", *rest, *recipe, *given]),
        "tokens_per_s": round(speed),
        "validation": [
            [int(tokens_per_step * iteration), round(float(loss), 5)]
            for iteration, loss in validation
        ],
    }


def in_order(runs: Sequence[dict]) -> list[dict]:
    """Return runs in the study's order, the baseline first.

    Raises:
        SystemExit: one has a name that the study lacks.
    """
    order = read_study(STUDY).names
    for run in runs:
        if run["name"] not in order:
            raise SystemExit(f"error: {run['name']}: no run of {STUDY.relative_to(ROOT)}")
    return sorted(runs, key=lambda run: (order.index(run["name"]), run["seed"]))


def losses_of(runs: Sequence[dict]) -> dict[str, dict[int, float]]:
    """Return the losses of runs by name and seed."""
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        losses.setdefault(run["name"], {})[run["seed"]] = run["loss"]
    return losses


def gaps_of(runs: Sequence[dict]) -> dict[str, tuple[float, float]]:
    """Return each name's gap to the first and its standard error, NaN of one seed.

    Raises:
        SystemExit: names have other seeds than the first.
    """
    losses = losses_of(runs)
    first, seeds = next(((name, sorted(by_seed)) for name, by_seed in losses.items()), ("", []))
    for name, by_seed in losses.items():
        if sorted(by_seed) != seeds:
            raise SystemExit(f"error: {name}: seeds {sorted(by_seed)}, {first}'s {seeds}")
    return paired_gaps(losses) if losses else {}


def longer_runs(runs: Sequence[dict], gaps_by_name: dict[str, tuple[float, float]]) -> list[list]:
    """Return the rows of the table of longer runs: means over the seeds of each name."""
    lines = []
    for name, (gap, error) in gaps_by_name.items():
        same = [run for run in runs if run["name"] == name]
        speed = fmean(run["tokens_per_s"] for run in same)
        lines.append([
            name,
            f"{fmean(run['loss'] for run in same):.4f}",
            shown_gap(gap, error) if lines else None,
            f"{math.exp(fmean(run['validation'][-1][1] for run in same)):.3f}",
            f"{speed:,.0f}",
            f"{same[0]['tokens'] / speed / 60:.1f}",
        ])  # fmt: skip
    return lines


def bars(steps: Steps, rows: dict[str, dict]) -> Bars:
    """Return the bars of a GPU's rows by precision, with the ratios of TIMES."""
    return Bars(
        steps.machine["gpu"],
        {name: row["tokens_per_s"] for name, row in rows.items()},
        {name: [steps.ratio(row, heading) for heading in TIMES] for name, row in rows.items()},
    )


def caption(shown: Sequence[Steps]) -> dict[str, Any]:
    """Return the values of the pictures' caption: ratios of TIMES for each GPU, and the model."""
    ratios = [
        [steps.machine["gpu"]]
        + [f"{steps.ratio(steps.choices()[MXFP8], base):.2f}" for base in TIMES]
        for steps in shown
    ]
    return {"ratios": ratios, "title": shown[0].models[PICTURED], "noise": NOISE}


def recommended(shown: Sequence[Steps], board: Sequence[dict]) -> list[list[str]]:
    """Return the table of RECOMMENDED: use, ratios with a figure for each GPU, gap on the board."""
    gaps_by_name = paired_gaps(losses_of(board)) if board else {}
    lines = [["recipe", "use", "× BF16", "× FP8", "× FP8, same loss", "loss gap"]]
    for name, use in RECOMMENDED.items():
        rows = [steps.rows.get((PICTURED, f"{name}, own loss", True)) for steps in shown]
        ratios = [
            " / ".join(
                f"{steps.ratio(row, base):.2f}" if row else "–"
                for steps, row in zip(shown, rows, strict=True)
            )
            for base in (*TIMES, SAME_LOSS)
        ]
        recipe, _, change = name.partition(" ")
        gap = shown_gap(*gaps_by_name[name]) if name in gaps_by_name else "not measured"
        link = f"[`{recipe}`](docs/recipes/{recipe_section(recipe)}) {change}".rstrip()
        lines.append([link, use, *ratios, gap])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folders that the command line names, then write page and pictures."""
    made = parser(__doc__, results=RESULTS, root=ROOT)
    made.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    args = made.parse_args(argv)
    found = {kind: read_steps(args.results, kind) for kind in KINDS}
    shown = [steps for steps in found.values() if steps and steps.choices()]
    if not shown or shown[0] is not found[KINDS[0]]:
        missing = args.results / f"flagship-{KINDS[0]}.json"
        command = f"python -m benchmarks flagship --output {missing}"
        raise SystemExit(f"error: {missing}: README's picture lacks steps; {command} adds them")
    kept_file = args.results / "flagship-runs.json"
    kept = json.loads(kept_file.read_text()) if kept_file.is_file() else []
    runs = merge(kept, [kept_run(*run) for folder in args.folders for run in finished_runs(folder)])
    runs = in_order(runs)
    gaps_by_name = gaps_of(runs)
    about = {"runs": runs, "seeds": len({run["seed"] for run in runs}), **provenance(runs)}
    longer = longer_runs(runs, gaps_by_name)
    words = caption(shown)
    text = render("results", measured=found, longer=longer, bases=BASES, **words, **about)
    images = args.root / "docs" / "images"
    if runs:
        kept_file.write_text(json.dumps(runs, indent=1) + "\n")
        draw_curves(runs, images / "results-runs.png")
    for name, rows_of in (("results", Steps.choices), ("results-steps", Steps.pictured)):
        draw_steps([bars(steps, rows_of(steps)) for steps in shown], TIMES, images / f"{name}.png")
    (args.root / "docs" / "results.md").write_text(text, encoding="utf-8")
    board_file = args.results / "leaderboard.json"
    board = json.loads(board_file.read_text()) if board_file.is_file() else []
    section = render("readme-results", recommended=recommended(shown, board), **words)
    replace_sections(args.root / "README.md", {"results": section})


if __name__ == "__main__":
    main()
