"""Keep what runs of the leaderboard's study gave, and write docs/leaderboard.md from them.

    lowbit-study run examples/studies/leaderboard.yaml --output runs/leaderboard --gpus 0 -- ...
    python docs/generate/leaderboard.py runs/leaderboard

Runs of a folder go into benchmarks/results/leaderboard.json, in the place of those of the same name
and seed; without folders the page is written from that file alone. A row's loss is the mean of the
last tenth of a finished run. Runs that were cut have a table of their own. Speeds are those of
benchmarks/results/model-fp4-h200.json.
"""

import argparse
import json
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown import RESULTS, ROOT
from markdown import table as markdown_table

from megatron_lowbit.analysis.comparison import final_loss, gaps, visible_gap
from megatron_lowbit.analysis.loss_curve import LossCurve, read_losses
from megatron_lowbit.recipes import Layer, Recipe, load_recipes

KEPT = RESULTS / "leaderboard.json"
SPEEDS = RESULTS / "model-fp4-h200.json"
PAGE = ROOT / "docs" / "leaderboard.md"
SHARE = 1 / 10
LATE, LAST_PART = "-late-bf16", " fprop=null"
"""Ending of the names of recipes that switch their forward pass, and of the contenders that are
timed as what comes after the switch."""
REFERENCE = "nvfp4"
"""The row that all other rows are compared with, beside the baseline."""
RECIPE, CHANGE = "--precision-recipe", "--recipe-set"
PLACES = ("--data-path", "--tokenizer-model", "--save-interval")
"""Arguments that say where a machine has the data, and when it saves: they change no loss."""
TEXT = """# FP4 methods, ranked by what they lose

    python docs/generate/leaderboard.py runs/leaderboard

writes this page from the runs of [the study](../examples/studies/leaderboard.yaml):
{model}, {tokens} tokens, {seeds} seeds a row. A loss is the mean of the last tenth of a run. Gaps
are relative to `{baseline}`, and to `nvfp4`, paired seed by seed, with their standard error; the
noise of all rows is pooled. {power} A row with fewer seeds than others has the gap of those alone.
A seed stands for initial weights and data. Beyond these runs differ by chance, the same run on two
kinds of GPU as well, which sum products in different orders. On one kind a run repeats to the bit:
`nvfp4` with seeds 1 and 2 did so on another H100 host, with kernels that were rewritten in between.

{table}
{cut}
Speed: forward and backward of a model of four layers of width 4096 in Transformer Engine's layers,
relative to `nvfp4`, where `benchmarks/results/{speeds}` has the recipe ({gpu}). Bits: of an
element, its share of block scales included, the mean over the operands of all linear layers.

Runs: {machines}.

The text is C source of Linux 6.1 (Debian's `linux-source-6.1`, 6.1.192-2): 114.2M tokens in
11,674 documents. In its folder:

    folders="block crypto drivers/infiniband drivers/net drivers/scsi drivers/usb"
    folders="$folders fs kernel lib mm net security sound"
    lowbit-tokenizer --input $folders --pattern '*.c' --vocab-size 8192 \\
        --output data/linux-tokenizer
    lowbit-preprocess --input $folders --pattern '*.c' \\
        --tokenizer-model data/linux-tokenizer --output-prefix data/linux

`benchmarks/results/leaderboard-mixed.json` keeps the previous board, which used another tokenizer
and mixed two kinds of GPU. Do not compare its losses with this table.

## Your own recipe

Look at it, run it beside the study's baseline with the study's arguments and seeds, and write the
page anew. The baseline's runs are not repeated where the folder has them:

```
lowbit-recipes show mine.yaml --num-layers 10
lowbit-study run examples/studies/leaderboard.yaml --recipes mine.yaml --output runs/leaderboard \\
    -- --data-path data/linux --tokenizer-model data/linux-tokenizer
python docs/generate/leaderboard.py runs/leaderboard
```
"""

CUT = """
Runs that were cut, by the mean over a tenth of a whole run before their end, against the same
iterations of `nvfp4`'s runs of the same seeds, with its standard error:

{table}
"""


def finished_runs(folder: Path) -> Iterator[tuple[dict[str, Any], LossCurve]]:
    """Yield what a study's folder says about each finished run, and its curve.

    Raises:
        SystemExit: there are none.
    """
    files = sorted(folder.glob("*/study.json"))
    found = [(file, json.loads(file.read_text())) for file in files]
    if not any(state["finished"] for _, state in found):
        raise SystemExit(f"error: {folder}: no finished run")
    for file, state in found:
        if state["finished"]:
            yield state, read_losses(file.with_name("metrics.jsonl"))


def cut_runs(
    folder: Path, finished: Sequence[tuple[dict[str, Any], LossCurve]]
) -> Iterator[dict[str, Any]]:
    """Yield what is kept of each run that was cut after half of its iterations or later.

    Its gap is that to REFERENCE's run of the same seed, which is among those that finished.
    """
    whole = {state["seed"]: curve for state, curve in finished if state["name"] == REFERENCE}
    for file in sorted(folder.glob("*/study.json")):
        state, metrics = json.loads(file.read_text()), file.with_name("metrics.jsonl")
        reference = whole.get(state["seed"])
        if state["finished"] or reference is None or not metrics.is_file():
            continue
        curve, last = read_losses(metrics), reference.iterations[-1]
        end = curve.iterations[-1]
        if end >= last / 2:
            parts = [one.losses[(one.iterations > end - SHARE * last) & (one.iterations <= end)]
                     for one in (curve, reference)]  # fmt: skip
            gap = float(parts[0].mean() / parts[1].mean() - 1)
            yield {"name": state["name"], "seed": state["seed"], "cut": end / last, "gap": gap}


def kept_of(state: dict[str, Any], curve: LossCurve) -> dict[str, Any]:
    """Return what is kept of a run."""
    recipe, rest = split(state["command"])
    return {
        "name": state["name"],
        "seed": state["seed"],
        "recipe": recipe,
        "arguments": rest,
        "machine": {key: state["machine"][key] for key in ("gpu", "torch", "commit")},
        "tokens": int(curve.tokens[-1]),
        "loss": final_loss(curve, SHARE),
    }


def split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's arguments of the recipe, and the others but for seed and data."""
    recipe, rest, words = [], [], iter(command)
    for word in words:
        if word in (RECIPE, CHANGE):
            recipe += [word, next(words)]
        elif word in (*PLACES, "--seed"):
            next(words)
        else:
            rest.append(word)
    return recipe, rest


def merge(kept: Sequence[dict], new: Sequence[dict]) -> list[dict]:
    """Return runs by name and seed, the new ones in the place of the old, those cut last.

    Raises:
        SystemExit: a finished run has other arguments than the rest, its recipe aside.
    """
    found: dict[tuple[str, int], dict] = {}
    for run in (*kept, *new):
        place = run["name"], run["seed"]
        if "cut" not in run or "cut" in found.get(place, run):
            found[place] = run
    finished = [run for run in found.values() if "cut" not in run]
    for run in finished:
        if (run["arguments"], run["tokens"]) != (finished[0]["arguments"], finished[0]["tokens"]):
            raise SystemExit(
                f"error: {run['name']}, seed {run['seed']}: other arguments or tokens than "
                f"{finished[0]['name']}, seed {finished[0]['seed']}"
            )
    return [*finished, *(run for run in found.values() if "cut" in run)]


def rows(runs: Sequence[dict], speeds: dict[str, float]) -> tuple[str, float, list[list[str]]]:
    """Return the baseline's name, the least gap that shows, and the table's rows, best first.

    Raises:
        SystemExit: no row is in BF16, or one has a seed that the baseline lacks.
    """
    by_name: dict[str, dict[int, dict]] = {}
    for run in runs:
        by_name.setdefault(run["name"], {})[run["seed"]] = run
    recipes = {name: _recipe(next(iter(own.values()))) for name, own in by_name.items()}
    baseline = next((name for name, recipe in recipes.items() if not _quantizes(recipe)), None)
    if baseline is None:
        raise SystemExit("error: no run of a recipe that quantizes nothing, to compare with")
    names = [baseline, *(name for name in by_name if name != baseline)]
    seeds = [sorted(by_name[name]) for name in names]
    for name, own in zip(names, seeds, strict=True):
        if not set(own) <= set(seeds[0]):
            raise SystemExit(f"error: {name}: seeds {own}, {baseline}'s {seeds[0]}")
    losses = [[by_name[name][seed]["loss"] for seed in own]
              for name, own in zip(names, seeds, strict=True)]  # fmt: skip
    from_baseline = gaps(losses, seeds)
    from_reference = _from_reference(names, losses, seeds)
    found = {}
    for name, own, (gap, error) in zip(names, losses, from_baseline, strict=True):
        run = next(iter(by_name[name].values()))
        found[name] = (
            math.inf if math.isnan(gap) else gap if name != baseline else -math.inf,
            error,
            [
                name,
                _source(run["recipe"]),
                str(len(own)),
                f"{statistics.fmean(own):.4f}",
                "" if name == baseline else _shown(gap, error),
                _shown(*from_reference[name]) if name in from_reference else "",
                _speed(run["recipe"], speeds),
                f"{_bits(recipes[name]):.3g}",
                f"`{shlex.join(run['recipe'])}`",
            ],
        )
    whole = [error for (gap, error, _), own in zip(found.values(), seeds, strict=True)
             if abs(gap) < math.inf and len(own) == len(seeds[0])]  # fmt: skip
    ordered = [cells for _, _, cells in sorted(found.values(), key=lambda one: one[0])]
    return baseline, visible_gap(max(whole, default=0.0), 1, 1), ordered


def _from_reference(
    names: Sequence[str], losses: Sequence[list[float]], seeds: Sequence[list[int]]
) -> dict[str, tuple[float, float]]:
    """Return the gaps to REFERENCE and their errors, of all names but it and the baseline."""
    if REFERENCE not in names:
        return {}
    first = names.index(REFERENCE)
    order = [first, *(i for i in range(1, len(names)) if i != first)]
    found = gaps([losses[i] for i in order], [seeds[i] for i in order])
    return {names[i]: found[place] for place, i in enumerate(order) if i != first}


def _shown(gap: float, error: float) -> str:
    """Return a gap in percent, with its error where that is known."""
    known = "" if math.isnan(error) else f" ± {100 * error:.2f}"
    return "diverged" if math.isnan(gap) else f"{100 * gap:+.2f}%{known}"


def _recipe(run: dict) -> Recipe:
    words = run["recipe"]
    given = list(zip(words[::2], words[1::2], strict=True))
    names = [word for key, word in given if key == RECIPE]
    return load_recipes(names, [word for key, word in given if key == CHANGE])


def _layers(blocks: int = 62) -> list[Layer]:
    """Return the linear layers of a GPT: of so many blocks, those of the published NVFP4 run."""
    names = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
             "mlp.linear_fc2")  # fmt: skip
    return [
        Layer(f"decoder.layers.{block}.{name}", block, blocks)
        for block in range(blocks)
        for name in names
    ]


def _quantizes(recipe: Recipe) -> bool:
    return any(recipe.precision_for(layer).quantized for layer in _layers())


def _bits(recipe: Recipe) -> float:
    """Return the mean bits an element of the operands of all GEMMs, which are as large."""
    return statistics.fmean(
        16.0 if side is None else side.format.bits_per_element
        for layer in _layers()
        for gemm in recipe.precision_for(layer).gemms.values()
        for side in gemm.sides
    )


def _source(words: Sequence[str]) -> str:
    """Return a link to the page of a shipped recipe; a file's name for any other."""
    name = words[1]
    pages = [page for page in (ROOT / "docs" / "recipes").glob("*.md")
             if name == page.stem or name.startswith(f"{page.stem}-")]  # fmt: skip
    page = max(pages, key=lambda page: len(page.stem), default=None)
    return f"`{Path(name).name}`" if page is None else f"[{name}](recipes/{page.name})"


def _speed(words: Sequence[str], speeds: dict[str, float]) -> str:
    """Return how many times as fast as nvfp4 a recipe is, every block of which was quantized."""
    changes = set(words[3::2])
    if words[1] not in speeds or changes - {"bf16_blocks=none"}:
        return "not measured"
    return f"{speeds['nvfp4'] / speeds[words[1]]:.2f}"


def read_speeds(file: Path) -> tuple[dict[str, float], str]:
    """Return milliseconds of forward and backward by recipe, and the GPU, of a benchmark's file."""
    measured = json.loads(file.read_text())
    times = {row["contender"]: row["both"]["median_ms"] for row in measured["rows"]}
    found = {name.removesuffix(" in TE"): ms for name, ms in times.items() if name.endswith("TE")}
    for after in [name for name in found if name.endswith(LAST_PART)]:
        before = after.removesuffix(LAST_PART)
        share = load_recipes([before + LATE]).switches[0].at
        found[before + LATE] = share * found[before] + (1 - share) * found[after]
    return found | {"bf16": times["TE BF16"]}, measured["machine"]["gpu"]


def page(runs: Sequence[dict], speeds_file: Path) -> str:
    """Return the page's text."""
    cut = [run for run in runs if "cut" in run]
    runs = [run for run in runs if "cut" not in run]
    speeds, gpu = read_speeds(speeds_file)
    baseline, visible, lines = rows(runs, speeds)
    seeds = len({run["seed"] for run in runs})
    power = (
        f"A gap of {100 * visible:.2g}% shows beyond two standard errors in four of five studies."
    )
    power = power if visible > 0 else "Without noise known, no gap can be judged."
    headings = ("", "recipe", "seeds", "loss", "gap", "to nvfp4", "speed", "bits", "arguments")
    machines = sorted({", ".join(map(str, run["machine"].values())) for run in runs})
    model = next((w.removeprefix("@") for w in runs[0]["arguments"] if w.startswith("@")), None)
    return TEXT.format(
        model="the arguments of each run" if model is None else f"[{model}](../{model})",
        tokens=f"{runs[0]['tokens'] / 1e6:.3g}M",
        seeds=seeds,
        baseline=baseline,
        power=power,
        table=markdown_table(headings, lines),
        cut=_cut(cut),
        speeds=speeds_file.name,
        gpu=gpu,
        machines="; ".join(machines),
    )


def _cut(runs: Sequence[dict]) -> str:
    """Return the text about runs that were cut; nothing without any."""
    lines = []
    for name in dict.fromkeys(run["name"] for run in runs):
        own = [run for run in runs if run["name"] == name]
        found = [run["gap"] for run in own]
        error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
        at = f"{100 * min(run['cut'] for run in own):.0f}%"
        lines.append([name, str(len(own)), at, _shown(statistics.fmean(found), error)])
    headings = ("", "seeds", "cut at", f"to {REFERENCE}")
    return CUT.format(table=markdown_table(headings, lines)) if lines else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folders that the command line names, then write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=KEPT, help="file that runs are kept in")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write")
    args = parser.parse_args(argv)
    kept = json.loads(args.results.read_text()) if args.results.is_file() else []
    new: list[dict[str, Any]] = []
    for folder in args.folders:
        finished = list(finished_runs(folder))
        new += [*(kept_of(*run) for run in finished), *cut_runs(folder, finished)]
    runs = merge(kept, new)
    if not runs:
        parser.error("no runs: give the folder of a study")
    text = page(runs, SPEEDS)
    args.results.write_text(json.dumps(runs, indent=1) + "\n")
    args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
