"""Loss curves of a model by recipe and seed, the recipes' gaps, and whether two machines' agree.

    python benchmarks/loss_curves.py --data-path data/stdlib --tokenizer-model data/tokenizer \
        --output benchmarks/results/loss-curves-cpu.json
    python benchmarks/loss_curves.py ... --seeds 1 2 3 4 --output gpu.json \
        --against benchmarks/results/loss-curves-cpu.json

The model is a 30M-parameter GPT unless --model says otherwise; what this script does not know goes
to the training script.

A seed draws other weights on a GPU than on a CPU, and low precision amplifies any difference, so
curves are compared as draws: each one of the other machine's with the spread over this machine's
seeds, in windows of 50 iterations. The file is written after every run; runs that it holds already
are not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from linear import SQUARE_INPUT
from rich.console import Console
from rich.table import Table

from megatron_lowbit.analysis.machine import machine

ROOT = Path(__file__).parents[1]
MXNORM = ("--mxnorm", "--transformer-impl", "local")
RECIPES = {
    "fp8-tile": ("--precision-recipe", "fp8-tile"),
    "fp8-tile, square": ("--precision-recipe", "fp8-tile", "--recipe-set", SQUARE_INPUT),
    "fp8-tile in TE": (
        "--precision-recipe",
        "fp8-tile",
        "--transformer-impl",
        "transformer_engine",
    ),
    "mxfp4-backward": ("--precision-recipe", "mxfp4-backward"),
    "nvfp4": ("--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none"),
    "bf16": ("--precision-recipe", "bf16"),
    "mxfp8": ("--precision-recipe", "mxfp8"),
    "mxfp8, MXNorm": ("--precision-recipe", "mxfp8", *MXNORM),
    "mxfp8, MXNorm p 1": ("--precision-recipe", "mxfp8", *MXNORM, "--mxnorm-p", "1"),
}
USUAL = ("fp8-tile", "fp8-tile, square", "mxfp4-backward", "nvfp4", "bf16")
WINDOW, LOG_INTERVAL = 50, 5


def train(recipe: str, seed: int, common: Sequence[str]) -> list[float]:
    """Return a run's losses, means over ``LOG_INTERVAL`` iterations."""
    with tempfile.TemporaryDirectory() as save:
        command = [sys.executable, *common, *RECIPES[recipe], "--bf16", "--seed", str(seed)]
        command += ["--log-interval", str(LOG_INTERVAL), "--save", save]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            sys.exit(f"error: {recipe}, seed {seed}: the run failed")
        lines = (Path(save) / "metrics.jsonl").read_text().splitlines()
    losses = [step["lm_loss"] for step in map(json.loads, lines) if "lm_loss" in step]
    return [
        statistics.fmean(losses[i : i + LOG_INTERVAL]) for i in range(0, len(losses), LOG_INTERVAL)
    ]


def windows(losses: Sequence[float], interval: int) -> list[float]:
    """Average over windows of iterations."""
    width = WINDOW // interval
    return [
        statistics.fmean(losses[i : i + width]) for i in range(0, len(losses) - width + 1, width)
    ]


def compare(here: list[dict], there: list[dict], interval: int) -> Table:
    """Compare each run of another machine with this one's seeds."""
    table = Table(title="in standard deviations of a further seed, by window")
    for name in ("recipe", "seed there", "largest", "root mean square", "last loss there", "here"):
        table.add_column(name)
    for run in there:
        seeds = [
            windows(r["losses"], interval)
            for r in here
            if r["recipe"] == run["recipe"].removesuffix(" in TE")
        ]
        if len(seeds) < 3:
            continue
        off = []
        for value, *others in zip(windows(run["losses"], interval), *seeds, strict=True):
            spread = statistics.stdev(others) * (1 + 1 / len(others)) ** 0.5
            off.append((value - statistics.fmean(others)) / spread)
        last = statistics.fmean(seed[-1] for seed in seeds)
        table.add_row(
            run["recipe"], str(run["seed"]), f"{max(map(abs, off)):.1f}",
            f"{statistics.fmean(x * x for x in off) ** 0.5:.2f}",
            f"{windows(run['losses'], interval)[-1]:.4f}", f"{last:.4f}",
        )  # fmt: skip
    return table


def gaps(runs: list[dict], interval: int) -> Table:
    """Compare each recipe's last window with bf16's of the same seed, in percent."""
    table = Table(title=f"last {WINDOW} iterations")
    for name in ("recipe", "seeds", "mean loss", "gap to bf16, %", "standard error"):
        table.add_column(name)
    last = {(r["recipe"], r["seed"]): windows(r["losses"], interval)[-1] for r in runs}
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        found = {seed: loss for (name, seed), loss in last.items() if name == recipe}
        ratios = [
            100 * (loss / last["bf16", seed] - 1)
            for seed, loss in found.items()
            if ("bf16", seed) in last
        ]
        gap = error = ""
        if recipe != "bf16" and len(ratios) > 1:
            gap = f"{statistics.fmean(ratios):+.2f}"
            error = f"{statistics.stdev(ratios) / len(ratios) ** 0.5:.2f}"
        mean = f"{statistics.fmean(found.values()):.4f}"
        table.add_row(recipe, str(len(found)), mean, gap, error)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Train what the file lacks, then compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", required=True, metavar="PREFIX")
    parser.add_argument("--tokenizer-model", required=True, metavar="DIR")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "examples" / "gpt-30m.args", metavar="FILE"
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=USUAL)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--against", type=Path, metavar="FILE.json", help="another machine's")
    args, others = parser.parse_known_args(argv)
    hybrid = "--hybrid-layer-pattern" in args.model.read_text()
    script = ROOT / ("pretrain_hybrid.py" if hybrid else "pretrain_gpt.py")
    common = [str(script), f"@{args.model}", "--data-path", args.data_path]
    common += ["--tokenizer-model", args.tokenizer_model, *others]
    data = {"machine": machine(), "log_interval": LOG_INTERVAL, "runs": []}
    if args.output.is_file():
        data = json.loads(args.output.read_text())
    for recipe in args.recipes:
        for seed in args.seeds:
            if any((r["recipe"], r["seed"]) == (recipe, seed) for r in data["runs"]):
                continue
            losses = train(recipe, seed, common)
            data["runs"].append({"recipe": recipe, "seed": seed, "losses": losses})
            args.output.write_text(json.dumps(data, indent=1) + "\n")
    Console(width=120).print(gaps(data["runs"], data["log_interval"]))
    if args.against is not None:
        there = json.loads(args.against.read_text())["runs"]
        Console(width=120).print(compare(data["runs"], there, data["log_interval"]))


if __name__ == "__main__":
    main()
