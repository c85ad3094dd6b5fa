"""Store the runs of the leaderboard's study; write docs/research/leaderboard.md and its picture.

    lowbit-study run examples/studies/leaderboard.yaml --output runs/leaderboard --gpus 0 -- ...
    python docs/generate/leaderboard.py runs/leaderboard

Finished runs of a folder replace runs of the same name and seed in
benchmarks/results/leaderboard.json; without folders the page is written from that file. The loss of
a row is the mean over the last tenth of a run. The picture has the rows with two or more stored
curves. Speeds come from benchmarks/results/model-fp4*-h200.json.
"""

import json
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from render import RESULTS, ROOT, parser, recipe_section, render

from megatron_lowbit.analysis.comparison import Contender, final_loss, gaps, visible_gap
from megatron_lowbit.analysis.comparison_page import picture
from megatron_lowbit.analysis.loss_curve import LossCurve, read_losses
from megatron_lowbit.recipes import Layer, Recipe, load_recipes

KEPT = RESULTS / "leaderboard.json"
SPEEDS = sorted(RESULTS.glob("model-fp4*-h200.json"))
PAGE = ROOT / "docs" / "research" / "leaderboard.md"
PICTURE = ROOT / "docs" / "images" / "leaderboard.png"
SHARE = 1 / 10
LATE, LAST_PART = "-late-bf16", " fprop=null"
"""Ending of the names of recipes that switch their forward pass, and of the contenders that are
timed as what comes after the switch."""
IN_TE = " in TE"
"""Ending of the names of contenders in Transformer Engine layers."""
REFERENCE = "nvfp4"
"""The row that all other rows are compared with, in addition to the baseline."""
RECIPE, CHANGE = "--precision-recipe", "--recipe-set"
PLACES = ("--data-path", "--tokenizer-model", "--save-interval")
"""Arguments that say where a machine has the data, and when it saves: they change no loss."""


def finished_runs(folder: Path) -> Iterator[tuple[dict[str, Any], LossCurve]]:
    """Yield what a study's folder says about each finished run, and its curve.

    Raises:
        SystemExit: there are none.
    """
    files = sorted(folder.glob("*/study.json"))
    states = [(file, json.loads(file.read_text())) for file in files]
    if not any(state["finished"] for _, state in states):
        raise SystemExit(f"error: {folder}: no finished run")
    for file, state in states:
        if state["finished"]:
            yield state, read_losses(file.with_name("metrics.jsonl"))


def kept_of(state: dict[str, Any], curve: LossCurve) -> dict[str, Any]:
    """Return the stored values of a run."""
    recipe, rest = split(state["command"])
    return {
        "name": state["name"],
        "seed": state["seed"],
        "recipe": recipe,
        "arguments": rest,
        "machine": {key: state["machine"][key] for key in ("gpu", "torch", "commit")},
        "loss": final_loss(curve, SHARE),
        **stored_curve(curve),
    }


def stored_curve(curve: LossCurve) -> dict[str, Any]:
    """Return the stored part of a curve: tokens, iterations between losses, and the losses.

    A run from the checkpoint of another has the checkpoint's iteration, too.
    """
    every = int(curve.iterations[1] - curve.iterations[0])
    start = int(curve.iterations[0]) - every
    return {
        "tokens": int(curve.tokens[-1]),
        "every": every,
        **({"start": start} if start else {}),
        "losses": [round(float(loss), 5) for loss in curve.losses],
    }


def curve_of(run: dict[str, Any]) -> LossCurve:
    """Restore a stored curve, without validation and speeds."""
    losses = np.array(run["losses"])
    iterations = run.get("start", 0) + run["every"] * np.arange(1, len(losses) + 1)
    tokens = run["tokens"] / iterations[-1] * iterations
    nothing = np.array([])
    return LossCurve(iterations, losses, nothing, nothing, tokens, np.full(len(losses), np.nan))


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
    """Return runs by name and seed, the new ones in the place of the old.

    Raises:
        SystemExit: a run has other arguments than the rest, its recipe aside.
    """
    runs = [*{(run["name"], run["seed"]): run for run in (*kept, *new)}.values()]
    for run in runs:
        if (run["arguments"], run["tokens"]) != (runs[0]["arguments"], runs[0]["tokens"]):
            raise SystemExit(
                f"error: {run['name']}, seed {run['seed']}: other arguments or tokens than "
                f"{runs[0]['name']}, seed {runs[0]['seed']}"
            )
    return runs


def baseline_of(runs: Sequence[dict]) -> str:
    """Return the name of the first run that quantizes nothing.

    Raises:
        SystemExit: there is none.
    """
    found = next((run["name"] for run in runs if not _quantizes(_recipe(run))), None)
    if found is None:
        raise SystemExit("error: no run of a recipe that quantizes nothing, to compare with")
    return found


def rows(
    runs: Sequence[dict], speeds: dict[str, float]
) -> tuple[str, int, float, list[list[object]]]:
    """Return the baseline's name, the fewest seeds, what gap shows with them, and the table's rows.

    Raises:
        SystemExit: a row has a seed that the baseline lacks.
    """
    by_name: dict[str, dict[int, dict]] = {}
    for run in runs:
        by_name.setdefault(run["name"], {})[run["seed"]] = run
    recipes = {name: _recipe(next(iter(by_seed.values()))) for name, by_seed in by_name.items()}
    baseline = baseline_of(runs)
    losses = {
        name: {seed: by_name[name][seed]["loss"] for seed in sorted(by_name[name])}
        for name in (baseline, *(name for name in by_name if name != baseline))
    }
    baseline_losses = losses[baseline]
    for name, by_seed in losses.items():
        if not set(by_seed) <= set(baseline_losses):
            raise SystemExit(
                f"error: {name}: seeds {[*by_seed]}, {baseline}'s {[*baseline_losses]}"
            )
    from_baseline = paired_gaps(losses)
    reference = losses.get(REFERENCE, {})
    others = {
        name: {seed: by_seed[seed] for seed in by_seed if seed in reference}
        for name, by_seed in losses.items()
        if name not in (baseline, REFERENCE) and by_seed.keys() & reference.keys()
    }
    from_reference = paired_gaps({REFERENCE: reference, **others}) if reference else {}
    lines: dict[str, list[object]] = {}
    for name in sorted(losses, key=lambda name: (name != baseline, _rank(*from_baseline[name]))):
        words = next(iter(by_name[name].values()))["recipe"]
        lines[name] = [
            name,
            _source(words),
            len(losses[name]),
            f"{statistics.fmean(losses[name].values()):.4f}",
            "" if name == baseline else shown_gap(*from_baseline[name]),
            shown_gap(*from_reference[name]) if name in others else "",
            _speed(words, speeds),
            f"{_bits(recipes[name]):.3g}",
            f"`{shlex.join(words)}`",
        ]
    fewest = min(map(len, losses.values()))
    errors = [float(error) for name, (_, error) in from_baseline.items()
              if len(losses[name]) == fewest and not math.isnan(error)]  # fmt: skip
    return baseline, fewest, visible_gap(max(errors, default=0.0), 1, 1), [*lines.values()]


def paired_gaps(losses: dict[str, dict[int, float]]) -> dict[str, tuple[float, float]]:
    """Return each row's gap to the first one, and its standard error."""
    values = [list(by_seed.values()) for by_seed in losses.values()]
    return dict(
        zip(losses, gaps(values, [list(by_seed) for by_seed in losses.values()]), strict=True)
    )


def _rank(gap: float, error: float) -> float:
    return math.inf if math.isnan(gap) else gap


def shown_gap(gap: float, error: float) -> str:
    """Return a gap in percent, with its error where that is known."""
    known = "" if math.isnan(error) else f" ± {100 * error:.2f}"
    return "diverged" if math.isnan(gap) else f"{100 * gap:+.2f}%{known}"


def _recipe(run: dict) -> Recipe:
    words = run["recipe"]
    given = list(zip(words[::2], words[1::2], strict=True))
    names = [word for key, word in given if key == RECIPE]
    return load_recipes(names, [word for key, word in given if key == CHANGE])


def _layers(blocks: int = 62) -> list[Layer]:
    """Return the linear layers of a GPT with as many blocks as the published NVFP4 run."""
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
    """Return the mean bits per element of the operands of all GEMMs, which are as large."""
    return statistics.fmean(
        16.0 if side is None else side.format.bits_per_element
        for layer in _layers()
        for gemm in recipe.precision_for(layer).gemms.values()
        for side in gemm.sides
    )


def _source(words: Sequence[str]) -> str:
    """Return a link to the page of a shipped recipe; a file's name for any other."""
    name = words[1]
    section = recipe_section(name)
    return f"`{Path(name).name}`" if section is None else f"[{name}](../recipes/{section})"


def _speed(words: Sequence[str], speeds: dict[str, float]) -> str:
    """Return the speed of a recipe, with every block quantized."""
    changes = set(words[3::2])
    if words[1] not in speeds or changes - {"bf16_blocks=none"}:
        return "not measured"
    return f"{speeds[words[1]]:.2f}"


def read_speeds(files: Sequence[Path]) -> tuple[dict[str, float], str]:
    """Return the speed of each recipe relative to nvfp4 in the same file, and the GPU."""
    speeds: dict[str, float] = {}
    for file in files:
        measured = json.loads(file.read_text())
        measured_ms = {row["contender"]: row["both"]["median_ms"] for row in measured["rows"]}
        times = {name.removesuffix(IN_TE): ms for name, ms in measured_ms.items() if IN_TE in name}
        times["bf16"] = measured_ms["TE BF16"]
        for after in [name for name in times if name.endswith(LAST_PART)]:
            before = after.removesuffix(LAST_PART)
            share = load_recipes([before + LATE]).switches[0].at
            times[before + LATE] = share * times[before] + (1 - share) * times[after]
        speeds = {name: times[REFERENCE] / ms for name, ms in times.items()} | speeds
    return speeds, measured["machine"]["gpu"]


def provenance(runs: Sequence[dict]) -> dict[str, str]:
    """Return the model, tokens and machines of runs."""
    file = next((w.removeprefix("@") for w in runs[0]["arguments"] if w.startswith("@")), None)
    return {
        "model": "the arguments of each run" if file is None else f"[{file}](../../{file})",
        "tokens": f"{runs[0]['tokens'] / 1e6:.3g}M",
        "machines": machines(runs),
    }


def machines(runs: Sequence[dict]) -> str:
    """Return the GPUs and torch versions of runs, each with the commits that ran there."""
    commits: dict[str, set[str]] = {}
    for run in runs:
        machine = run["machine"]
        name = f"{machine.get('gpu')}, torch {machine.get('torch')}"
        commits.setdefault(name, set()).add(str(machine.get("commit"))[:7])
    return "; ".join(
        f"{name}, commit{'s' * (len(found) > 1)} {', '.join(sorted(found))}"
        for name, found in commits.items()
    )


def page(
    runs: Sequence[dict], speeds_files: Sequence[Path], contenders: Sequence[Contender]
) -> str:
    """Return the page's text; the picture is of ``contenders``, if there are several."""
    speeds, gpu = read_speeds(speeds_files)
    baseline, fewest, visible, lines = rows(runs, speeds)
    return render(
        "leaderboard", baseline=baseline, fewest=fewest, visible=visible, lines=lines,
        speeds=[file.name for file in speeds_files], gpu=gpu, pictured=len(contenders) > 1,
        **provenance(runs),
    )  # fmt: skip


def drawn(runs: Sequence[dict]) -> list[Contender]:
    """Return the stored curves of each row with two or more seeds of the baseline, which is first.

    Other seeds are ignored: their gaps would not be paired.
    """
    stored: dict[str, dict[int, LossCurve]] = {baseline_of(runs): {}}
    for run in runs:
        if "losses" in run:
            stored.setdefault(run["name"], {})[run["seed"]] = curve_of(run)
    baseline, *_ = stored.values()
    paired = {
        name: {seed: curve for seed, curve in curves.items() if seed in baseline}
        for name, curves in stored.items()
    }
    return [
        Contender(name, tuple(curves.values()), tuple(curves))
        for name, curves in paired.items()
        if len(curves) > 1
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folders that the command line names, then write the page."""
    made = parser(__doc__, results=KEPT, page=PAGE)
    made.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    args = made.parse_args(argv)
    kept = json.loads(args.results.read_text()) if args.results.is_file() else []
    runs = merge(kept, [kept_of(*run) for folder in args.folders for run in finished_runs(folder)])
    if not runs:
        made.error("no runs: give the folder of a study")
    contenders = drawn(runs)
    text = page(runs, SPEEDS, contenders)
    lines = ",\n".join(map(json.dumps, runs))
    args.results.write_text(f"[\n{lines}\n]\n")
    args.page.write_text(text, encoding="utf-8")
    if len(contenders) > 1:
        PICTURE.write_bytes(picture(contenders, SHARE))


if __name__ == "__main__":
    main()
