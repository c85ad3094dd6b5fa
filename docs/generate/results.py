"""Write docs/results.md, its pictures and README's table from measured steps.

    python -m benchmarks flagship --output benchmarks/results/flagship-h100.json
    python docs/generate/results.py

Steps are read from benchmarks/results/flagship-h100*.json, flagship-h200*.json and, of several
GPUs, flagship-2xh200*.json and flagship-4xh200*.json. The page names missing measurements; only the
H100's steps that README's picture shows are required.
"""

import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from leaderboard import paired_gaps, shown_gap
from render import RESULTS, ROOT, parser, recipe_section, render, replace_sections
from results_pictures import Bars, draw_steps, is_own
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

RECOMMENDED = {
    "mxfp8": "pretraining on H100 and H200",
    "mxfp8 with its output layer": "faster, with a larger loss gap",
    "fp8-tile": "pretraining with the blocks of DeepSeek-V3, which servers load directly",
    "mxfp4-backward": "FP4 with a small gap: a forward pass in BF16, gradients in MXFP4",
    "nvfp4": "NVIDIA's NVFP4 pretraining",
}
"""Recipes of README's table, and their use."""


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
    losses: dict[str, dict[int, float]] = {}
    for run in json.loads(file.read_text()) if file.is_file() else []:
        losses.setdefault(run["name"], {})[run["seed"]] = run["loss"]
    pairs = paired_gaps(losses) if losses else {}
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
    """Write page and pictures."""
    args = parser(__doc__, results=RESULTS, root=ROOT).parse_args(argv)
    found = {kind: read_steps(args.results, kind) for kind in KINDS}
    several = {kind: read_steps(args.results, kind) for kind in SEVERAL}
    shown = [steps for steps in found.values() if steps and steps.choices()]
    if not shown or shown[0] is not found[KINDS[0]]:
        missing = args.results / f"flagship-{KINDS[0]}.json"
        command = f"python -m benchmarks flagship --output {missing}"
        raise SystemExit(f"error: {missing}: README's picture lacks steps; {command} adds them")
    words = caption(shown) | {"memory": memory(args.results / "peak_memory-h200.json")}
    gaps = board_gaps(args.results / "leaderboard.json")
    hosts = found | {kind: steps for kind, steps in several.items() if steps}
    text = render("results", measured=hosts, overview=overview(shown, gaps), **words)
    images = args.root / "docs" / "images"
    for name, rows_of in (("results", Steps.choices), ("results-steps", Steps.pictured)):
        draw_steps([bars(steps, rows_of(steps)) for steps in shown], TIMES, images / f"{name}.png")
    (args.root / "docs" / "results.md").write_text(text.rstrip() + "\n", encoding="utf-8")
    section = render("readme-results", recommended=recommended(shown, gaps), **words)
    replace_sections(args.root / "README.md", {"results": section})


if __name__ == "__main__":
    main()
