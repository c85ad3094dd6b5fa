"""Keep what the longer runs gave, and write docs/results.md, its pictures and README's.

    python benchmarks/flagship.py --output benchmarks/results/flagship-h100.json
    lowbit-study run examples/studies/flagship.yaml --output runs/flagship --gpus 0 -- ...
    python docs/generate/results.py runs/flagship

Steps are those of benchmarks/results/flagship-h100*.json and flagship-h200*.json. Finished runs of
a folder go into benchmarks/results/flagship-runs.json, in the place of those of the same name and
seed; without a folder the page is written from that file. The page says what was not measured; only
the steps that README's picture shows must be there.
"""

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
from leaderboard import finished_runs, kept_of, merge, split
from markdown import RESULTS, ROOT, replace_sections, table
from results_pictures import draw_curves, draw_summary

from megatron_lowbit.analysis.comparison import gaps
from megatron_lowbit.analysis.loss_curve import LossCurve
from megatron_lowbit.study.definition import Job, read_study, training_words

KINDS = ("h100", "h200")
RUNS, GPU_TIME = "flagship-runs.json", "gpu-time-{kind}.json"
STUDY = ROOT / "examples" / "studies" / "flagship.yaml"
BF16, OWN_FP8 = "Megatron-LM BF16", "Megatron-LM FP8 blockwise"
DATA = "--data-path data/linux --tokenizer-model data/linux-tokenizer"
MEASURE = "python benchmarks/flagship.py --output {file}"
TEXT = """# Results

What recipes do to the speed and the loss of models that are known, beside Megatron-LM's own BF16
and blockwise FP8 on the same kind of GPU. `python docs/generate/results.py` writes this page from
what the commands on it measured.

Hopper has no FP4 tensor cores: there `nvfp4` and the forward pass of `mxfp4-backward` multiply in
BF16, and quantization comes on top. `nvfp4-fold` and the backward pass of `mxfp4-backward` multiply
in FP8. [Limits](performance.md#limits) has the counts.

{steps}

## Longer runs

{runs}
"""
NOT_MEASURED = """## Whole training steps on one {kind}

Not measured: `{command}` on such a machine does it."""
STEPS = """## Whole training steps on one {gpu}

    python benchmarks/flagship.py --output benchmarks/results/{name}.json

Medians of the steps after the sixth, beside the fastest; one run a row, every linear layer of every
block quantized. A median far from the fastest points to a CPU that keeps the GPU waiting. TFLOP/s
are those that Megatron-LM prints, by its own formula; MFU is their share of {peak} TFLOP/s. GiB is
the most that PyTorch had allocated; graphs keep activations in pools that it does not count. "×
BF16" and "× blockwise" compare tokens/s with the first two rows, in graphs (`--cuda-graph-impl
local`) with their rows in graphs. GEMMs add weight gradients to main gradients, but where a command
has `--no-gradient-accumulation-fusion`.
Rows of different commits, which stand with their commands, may be of different hosts. The
GPUs of one host ran their cases at the same time.
torch {torch}, Transformer Engine {engine}, {dates}, commit {commits}.

{tables}

{behind}

{times}
"""
TIMES = """### GPU time by kind of kernel: {gpu}

    python benchmarks/gpu_time.py --only {cases} --output benchmarks/results/{file}

Milliseconds of a step in which the GPU runs a kernel ("busy"), and those of kernels by kind, which
may overlap; beside them the step's median above. What is left there the GPU waits. Commit {commit}.

{table}"""
RUN = """    lowbit-study run examples/studies/flagship.yaml --output runs/flagship --gpus 0 \\
        -- --data-path data/linux --tokenizer-model data/linux-tokenizer"""
LONGER = """{run}
    python docs/generate/results.py runs/flagship

{model}, {tokens} tokens, {seeds} each. Stopped, the first command continues from a checkpoint.
Figures are means of the seeds. The loss is that of the last tenth of a run, and its gap is relative
to `{baseline}`{noise}. The perplexity is that of the last validation, in a run's own precision.
Minutes are the tokens of a run at its median speed, without start, validation and checkpoints.
The [leaderboard](leaderboard.md) tells smaller gaps from noise: more seeds, of a smaller model.

{table}

![Validation perplexity by tokens and by minutes](images/{picture})

Runs: {machines} (GPU, torch, commit). Each alone:

```
{commands}
```

The text is C source of Linux 6.1 (Debian's `linux-source-6.1`). In its folder:

```
lowbit-tokenizer --input block crypto drivers/net fs kernel lib mm net security sound \\
    --pattern '*.c' --vocab-size 8192 --output data/linux-tokenizer
lowbit-preprocess --input arch block crypto drivers fs kernel lib mm net security sound \\
    --pattern '*.c' --tokenizer-model data/linux-tokenizer --output-prefix data/linux --workers 2
```
"""
NOT_RUN = f"Not run yet:\n\n{RUN}"
README = """![Tokens a second of each recipe](docs/images/{picture})

Tokens/s in whole training steps on one {gpu}, with CUDA graphs where they were measured and are
faster.{gaps} [docs/results.md](docs/results.md) has the models, memory and each row's command."""
README_GAPS = """ Right: the gap to BF16's loss after {tokens} tokens in
[longer runs](docs/results.md#longer-runs) of another model, with its standard error over {seeds}
seeds."""


class AmaxSpec(NamedTuple):
    """Rows of a kind of GPU by model, precision and graphs, and the machine that they are from.

    ``times`` is the file of GPU time by kind of kernel, where there is one.
    """

    name: str
    rows: dict[tuple[str, str, bool], dict]
    times: dict | None
    machine: dict
    models: dict[str, str]
    peak: float


def read_steps(results: Path, kind: str) -> AmaxSpec | None:
    """Read the files of a kind of GPU; None where there are none.

    Raises:
        SystemExit: one is of another GPU, or none holds a row that ended well.
    """
    name = f"flagship-{kind}"
    files = sorted(results.glob(f"{name}*.json"))
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
    file = results / GPU_TIME.format(kind=kind)
    times = json.loads(file.read_text()) if file.is_file() else None
    return AmaxSpec(name, rows, times, data["machine"], data["models"], data["peak_tflops"])


def ratio(found: AmaxSpec, row: dict, base: str) -> float | None:
    """Return how many times as fast as a precision of Megatron-LM's own a row is."""
    other = found.rows.get((row["model"], base, row["graphs"]), {})
    return row["tokens_per_s"] / other["tokens_per_s"] if "tokens_per_s" in other else None


def steps_text(kind: str, found: AmaxSpec | None) -> str:
    """Describe the steps on one kind of GPU."""
    if found is None:
        command = MEASURE.format(file=f"benchmarks/results/flagship-{kind}.json")
        return NOT_MEASURED.format(kind=kind.upper(), command=command)
    rows = list(found.rows.values())
    tables = []
    for model, title in found.models.items():
        own = [row for row in rows if row["model"] == model]
        if own:
            tables += [f"### {title}: {found.machine['gpu']}", _table(found, own), _commands(own)]
    return STEPS.format(
        gpu=found.machine["gpu"],
        name=found.name,
        peak=f"{found.peak:g}",
        torch=found.machine["torch"],
        engine=found.machine.get("transformer-engine", "not installed"),
        dates=" and ".join(sorted({row["date"] for row in rows})),
        commits=" and ".join(sorted({_commit(row) for row in rows})),
        tables="\n\n".join(tables),
        behind=_behind(found),
        times=_times(kind, found),
    ).strip()


def _table(found: AmaxSpec, rows: Sequence[dict]) -> str:
    lines = [
        [
            f"{row['precision']}{', graphs' if row['graphs'] else ''}",
            f"{row['median_ms']:.0f} ({row['fastest_ms']:.0f})",
            f"{row['tokens_per_s']:,}",
            f"{row['tflop_per_s']:.0f}",
            f"{row['mfu']:.1%}",
            f"{row['peak_gib']:.1f}",
            ratio(found, row, BF16),
            ratio(found, row, OWN_FP8),
        ]
        for row in rows
        if "error" not in row
    ]
    failed = [f"- {row['case']}: {shorten(row['error'], 100)}" for row in rows if "error" in row]
    headings = ("", "ms (fastest)", "tokens/s", "TFLOP/s", "MFU", "GiB", "× BF16", "× blockwise")
    parts = [table(headings, lines)] if lines else []
    return "\n\n".join(parts + (["Failed:", "\n".join(failed)] if failed else []))


def _commands(rows: Sequence[dict]) -> str:
    lines = [f"# {row['case']}, commit {_commit(row)}\n{row['command']}" for row in rows]
    return "\n".join(["<details><summary>commands</summary>", "", "```", *lines, "```", "",
                      "</details>"])  # fmt: skip


def _commit(row: dict) -> str:
    return row["commit"][:12] or "unknown"


def _behind(found: AmaxSpec) -> str:
    """Name the rows of recipes that are slower than Megatron-LM's own FP8, and than its BF16."""
    lines = []
    for base in (OWN_FP8, BF16):
        own = [row for row in found.rows.values() if row["precision"] not in (BF16, OWN_FP8)]
        ratios = {row["case"]: ratio(found, row, base) for row in own if "error" not in row}
        slower = [f"{case} ({x:.2f})" for case, x in ratios.items() if x is not None and x < 1]
        lines.append(f"Slower than {base}: {', '.join(slower) or 'none'}.")
    return "\n\n".join(lines)


def _times(kind: str, found: AmaxSpec) -> str:
    """Tabulate the GPU's time by kind of kernel; nothing where it was not measured."""
    if found.times is None:
        return ""
    rows = [row for row in found.times["rows"] if "error" not in row]
    medians = {row["case"]: row.get("median_ms") for row in found.rows.values()}
    lines = [[row["case"], medians.get(row["case"]), *row["milliseconds"].values()] for row in rows]
    return TIMES.format(
        gpu=found.times["machine"]["gpu"],
        commit=found.times["machine"]["commit"][:12],
        cases=shlex.join(row["case"] for row in rows),
        file=GPU_TIME.format(kind=kind),
        table=table(("", "median", *rows[0]["milliseconds"]), lines),
    )


def kept_run(state: dict[str, Any], curve: LossCurve) -> dict[str, Any]:
    """Return what is kept of a run: what the leaderboard keeps, its validation and its speed.

    Raises:
        SystemExit: it has no validation, or no speed.
    """
    speed = float(np.nanmedian(curve.speeds)) if np.isfinite(curve.speeds).any() else math.nan
    if math.isnan(speed) or not len(curve.validation_losses):
        raise SystemExit(f"error: {state['name']}, seed {state['seed']}: no validation or no speed")
    a_step = curve.tokens[-1] / curve.iterations[-1]
    job = Job(state["name"], state["seed"], Path(), ["python", *state["command"]])
    recipe, rest = split(training_words(job))
    own = ["--seed", str(state["seed"]), *DATA.split(), "--save", f"runs/{state['name']}"]
    return {
        **kept_of(state, curve),
        "command": shlex.join(["lowbit-pretrain", *rest, *recipe, *own]),
        "tokens_per_s": round(speed),
        "validation": [
            [int(a_step * iteration), round(float(loss), 5)]
            for iteration, loss in zip(
                curve.validation_iterations, curve.validation_losses, strict=True
            )
        ],
    }


def in_order(runs: Sequence[dict]) -> list[dict]:
    """Return runs in the study's order, the baseline first.

    Raises:
        SystemExit: one has a name that the study has not.
    """
    order = read_study(STUDY).names
    for run in runs:
        if run["name"] not in order:
            raise SystemExit(f"error: {run['name']}: no run of {STUDY.relative_to(ROOT)}")
    return sorted(runs, key=lambda run: (order.index(run["name"]), run["seed"]))


def gaps_of(runs: Sequence[dict]) -> dict[str, tuple[float, float]]:
    """Return each name's gap to the first and its standard error, NaN of one seed.

    Raises:
        SystemExit: names have other seeds than the first.
    """
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        losses.setdefault(run["name"], {})[run["seed"]] = run["loss"]
    first, seeds = next((name, sorted(own)) for name, own in losses.items())
    for name, own in losses.items():
        if sorted(own) != seeds:
            raise SystemExit(f"error: {name}: seeds {sorted(own)}, {first}'s {seeds}")
    found = gaps([[own[seed] for seed in seeds] for own in losses.values()])
    return {
        name: (float(gap), float(error)) for name, (gap, error) in zip(losses, found, strict=True)
    }


def runs_text(runs: Sequence[dict], picture: str) -> str:
    """Describe the longer runs."""
    if not runs:
        return NOT_RUN
    found, baseline, lines = gaps_of(runs), runs[0]["name"], []
    known = not any(math.isnan(error) for _, error in found.values())
    for name, (gap, error) in found.items():
        own = [run for run in runs if run["name"] == name]
        shown = f"{100 * gap:+.2f}%" + (f" ± {100 * error:.2f}" if known else "")
        speed = fmean(run["tokens_per_s"] for run in own)
        lines.append(
            [
                name,
                f"{fmean(run['loss'] for run in own):.4f}",
                None if name == baseline else shown,
                f"{math.exp(fmean(run['validation'][-1][1] for run in own)):.3f}",
                f"{speed:,.0f}",
                f"{own[0]['tokens'] / speed / 60:.1f}",
            ]
        )
    seeds = len({run["seed"] for run in runs})
    model = next((w.removeprefix("@") for w in runs[0]["arguments"] if w.startswith("@")), None)
    machines = sorted({", ".join(map(str, run["machine"].values())) for run in runs})
    headings = ("", "loss", "gap", "perplexity", "tokens/s", "minutes")
    return LONGER.format(
        run=RUN,
        model="The arguments of each run" if model is None else f"[{model}](../{model})",
        tokens=f"{runs[0]['tokens'] / 1e6:.3g}M",
        seeds=f"{seeds} seed" + "s" * (seeds > 1),
        baseline=baseline,
        noise=", with its standard error" if known else "; one seed says nothing about its noise",
        table=table(headings, lines),
        picture=picture,
        machines="; ".join(machines),
        commands="\n".join(
            f"# {run['name']}, seed {run['seed']}\n{run['command']}" for run in runs
        ),
    ).strip("\n")


def speeds_of(found: AmaxSpec, model: str) -> dict[str, int]:
    """Return a model's tokens/s by precision, those of graphs where they are higher."""
    speeds: dict[str, int] = {}
    for row in found.rows.values():
        if row["model"] == model and "error" not in row:
            speeds[row["precision"]] = max(row["tokens_per_s"], speeds.get(row["precision"], 0))
    return speeds


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folders that the command line names, then write page and pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs")
    args = parser.parse_args(argv)
    steps = {kind: read_steps(args.results, kind) for kind in KINDS}
    shown = steps[KINDS[0]]
    if shown is None:
        missing = args.results / f"flagship-{KINDS[0]}.json"
        raise SystemExit(f"error: {missing}: is missing; {MEASURE.format(file=missing)} makes it")
    speeds = {model: own for model in shown.models if (own := speeds_of(shown, model))}
    kept_file = args.results / RUNS
    kept = json.loads(kept_file.read_text()) if kept_file.is_file() else []
    runs = merge(kept, [kept_run(*run) for folder in args.folders for run in finished_runs(folder)])
    runs = in_order(runs)
    curves, summary, images = "results-runs.png", "results.png", args.root / "docs" / "images"
    sections = [steps_text(kind, found) for kind, found in steps.items()]
    text = TEXT.format(steps="\n\n".join(sections), runs=runs_text(runs, curves))
    gap: dict[str, tuple[float, float]] = {}
    about_gaps, seeds = "", len({run["seed"] for run in runs})
    if seeds > 1:  # of one, the noise is unknown
        gap = dict(list(gaps_of(runs).items())[1:])
        about_gaps = README_GAPS.format(tokens=f"{runs[0]['tokens'] / 1e6:.3g}M", seeds=seeds)
    if runs:
        kept_file.write_text(json.dumps(runs, indent=1) + "\n")
        draw_curves(runs, images / curves)
    draw_summary(speeds, gap, (BF16, OWN_FP8), images / summary)
    (args.root / "docs" / "results.md").write_text(text, encoding="utf-8")
    section = README.format(picture=summary, gpu=shown.machine["gpu"], gaps=about_gaps)
    replace_sections(args.root / "README.md", {"results": section})


if __name__ == "__main__":
    main()
