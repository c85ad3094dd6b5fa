"""Store the longer runs, and write docs/results.md, its pictures and README's.

    python -m benchmarks flagship --output benchmarks/results/flagship-h100.json
    lowbit-study run examples/studies/flagship.yaml --output runs/flagship --gpus 0 -- ...
    python docs/generate/results.py runs/flagship

Steps are read from benchmarks/results/flagship-h100*.json, flagship-h200*.json and, of several
GPUs, flagship-2xh200*.json and flagship-4xh200*.json. Finished runs of a folder go into
benchmarks/results/flagship-runs.json and replace runs of the same name and seed; without a folder
the page is written from that file. The page names missing measurements; only the
H100's steps that README's picture shows are required.
"""

import json
import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from leaderboard import (
    finished_runs,
    kept_of,
    merge,
    paired_gaps,
    provenance,
    shown_gap,
)  # fmt: skip
from render import RESULTS, ROOT, parser, recipe_section, render, replace_sections
from results_pictures import Bars, draw_curves, draw_steps, is_own
from steps import (
    BF16,
    BF16_SAME_LOSS,
    KINDS,
    MXFP8,
    NOISE,
    ORDER,
    PICTURED,
    SAME_LOSS,
    SEVERAL,
    TIMES,
    Steps,
    read_steps,
)

from megatron_lowbit.analysis.loss_curve import LossCurve
from megatron_lowbit.study.definition import read_study

STUDY = ROOT / "examples" / "studies" / "flagship.yaml"
RECOMMENDED = {
    "mxfp8": "pretraining on H100 and H200",
    "mxfp8 with its output layer": "faster, with a larger loss gap",
    "fp8-tile": "pretraining with the blocks of DeepSeek-V3, which servers load directly",
    "mxfp4-backward": "FP4 with a small gap: a forward pass in BF16, gradients in MXFP4",
    "nvfp4": "NVIDIA's NVFP4 pretraining",
}
"""Recipes of README's table, and their use."""


def kept_run(state: dict[str, Any], curve: LossCurve) -> dict[str, Any]:
    """Return the stored values of a run: the leaderboard's, its validation and its speed.

    Raises:
        SystemExit: it has no validation, or no speed.
    """
    speed = float(np.nanmedian(curve.speeds)) if np.isfinite(curve.speeds).any() else math.nan
    if math.isnan(speed) or not len(curve.validation_losses):
        raise SystemExit(f"error: {state['name']}, seed {state['seed']}: no validation or no speed")
    tokens_per_step = curve.tokens[-1] / curve.iterations[-1]
    validation = zip(curve.validation_iterations, curve.validation_losses, strict=True)
    return {
        **kept_of(state, curve),
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
    words = {"title": shown[0].models[PICTURED], "noise": NOISE, "peak": shown[0].peak}
    return words | {"ratios": ratios}


def board_gaps(file: Path) -> dict[str, str]:
    """Return the loss gaps of the leaderboard by name, none without its file."""
    board = json.loads(file.read_text()) if file.is_file() else []
    pairs = paired_gaps(losses_of(board)) if board else {}
    return {name: shown_gap(*pair) for name, pair in pairs.items() if name != "bf16"}


def linked(name: str, folder: str) -> str:
    """Return a recipe and its change, as rows name it, with a link from a folder's pages."""
    recipe, _, change = name.partition(" ")
    return f"[`{recipe}`]({folder}recipes/{recipe_section(recipe)}) {change}".rstrip()


def for_each(ratios: Sequence[float | None]) -> str:
    """Return the cell of a table with a ratio for each GPU."""
    return " / ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)


def recommended(shown: Sequence[Steps], gaps: dict[str, str]) -> list[list[str]]:
    """Return the table of RECOMMENDED: use, ratios with a figure for each GPU, gap on the board."""
    lines = [["recipe", "use", "× BF16", "same kernel", "× FP8", "same kernel", "loss gap"]]
    for name, use in RECOMMENDED.items():
        rows = [(steps, steps.rows.get((PICTURED, f"{name}, own loss", True))) for steps in shown]
        ratios = [
            for_each([row and steps.ratio(row, base) for steps, row in rows])
            for base in (TIMES[0], BF16_SAME_LOSS, TIMES[1], SAME_LOSS)
        ]
        lines.append([linked(name, "docs/"), use, *ratios, gaps.get(name, "not measured")])
    return lines


def overview(shown: Sequence[Steps], gaps: dict[str, str]) -> list[list[str]]:
    """Return the table of all precisions: the speedups of each model on each GPU, and the gap."""
    titles = {model: title for steps in shown for model, title in steps.models.items()}
    speeds = {model: [steps.speedups(model) for steps in shown] for model in titles}
    speeds = {model: by_gpu for model, by_gpu in speeds.items() if any(by_gpu)}
    lines = [["", *(titles[model].partition(", ")[0] for model in speeds), "loss gap"]]
    names = {precision.partition(", ")[0] for precision in ORDER} - {BF16}
    for name in sorted(names, key=lambda name: (not is_own(name), name)):
        ratios = [[speed.get(name) for speed in by_gpu] for by_gpu in speeds.values()]
        if any(map(any, ratios)):
            label = name if is_own(name) else linked(name, "")
            cells = [for_each(cell) if any(cell) else "" for cell in ratios]
            lines.append([label, *cells, gaps.get(name, "")])
    return lines


def memory(file: Path) -> dict | None:
    """Return a file of peak memory with a table, the smallest first; None where there is none."""
    if not file.is_file():
        return None
    data = json.loads(file.read_text())
    cases = f"{PICTURED} graphs "
    peaks = {row["case"].removeprefix(cases): row["peak_gib"] for row in data["rows"]}
    rows = sorted(peaks.items(), key=itemgetter(1))
    table = [[name, f"{gib:.1f}", f"{gib - peaks[BF16]:+.1f}"] for name, gib in rows]
    return data | {"peaks": peaks, "table": table}


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folders that the command line names, then write page and pictures."""
    made = parser(__doc__, results=RESULTS, root=ROOT)
    made.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    args = made.parse_args(argv)
    found = {kind: read_steps(args.results, kind) for kind in KINDS}
    several = {kind: read_steps(args.results, kind) for kind in SEVERAL}
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
    words = caption(shown) | {"memory": memory(args.results / "peak_memory-h200.json")}
    gaps = board_gaps(args.results / "leaderboard.json")
    hosts = found | {kind: steps for kind, steps in several.items() if steps}
    tables = {"measured": hosts, "longer": longer, "overview": overview(shown, gaps)}
    text = render("results", **tables, **words, **about)
    images = args.root / "docs" / "images"
    if runs:
        kept_file.write_text(json.dumps(runs, indent=1) + "\n")
        draw_curves(runs, images / "results-runs.png")
    for name, rows_of in (("results", Steps.choices), ("results-steps", Steps.pictured)):
        draw_steps([bars(steps, rows_of(steps)) for steps in shown], TIMES, images / f"{name}.png")
    (args.root / "docs" / "results.md").write_text(text, encoding="utf-8")
    section = render("readme-results", recommended=recommended(shown, gaps), **words)
    replace_sections(args.root / "README.md", {"results": section})


if __name__ == "__main__":
    main()
