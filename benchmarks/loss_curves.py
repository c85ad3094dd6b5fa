"""Loss curves of a model by recipe and seed, and the recipes' gaps.

    python -m benchmarks loss_curves --data-path data/stdlib --tokenizer-model data/tokenizer \
        --output benchmarks/results/loss-curves-cpu.json

The model is a 30M-parameter GPT unless --model says otherwise; what this script does not know goes
to the training script. The file is written after every run; runs that it holds already are not
repeated.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import records
from benchmarks.linear import SQUARE_INPUT
from benchmarks.training_steps import HYBRID, OURS, ROOT, train_here

RECIPES = {
    "fp8-tile": "fp8-tile",
    "fp8-tile, square": f"fp8-tile --recipe-set {SQUARE_INPUT}",
    "fp8-tile in TE": "fp8-tile --transformer-impl transformer_engine",
    "mxfp4-backward": "mxfp4-backward",
    "nvfp4": "nvfp4 --recipe-set bf16_blocks=none",
    "bf16": "bf16",
    "mxfp8": "mxfp8",
    "mxfp8, MXNorm": "mxfp8 --mxnorm --transformer-impl local",
    "mxfp8, MXNorm p 1": "mxfp8 --mxnorm --transformer-impl local --mxnorm-p 1",
}
USUAL = ("fp8-tile", "fp8-tile, square", "mxfp4-backward", "nvfp4", "bf16")
WINDOW, LOG_INTERVAL = 50, 5


def means(losses: Sequence[float], width: int) -> list[float]:
    """Average over stretches of so many losses; the last one may be shorter."""
    return [statistics.fmean(losses[i : i + width]) for i in range(0, len(losses), width)]


def gaps(runs: list[dict], interval: int) -> Table:
    """Compare each recipe's last window with bf16's of the same seed, in percent."""
    headings = ("recipe", "seeds", "mean loss", "gap to bf16, %", "standard error")
    table, width = Table(*headings, title=f"last {WINDOW} iterations"), WINDOW // interval
    last = {(r["recipe"], r["seed"]): statistics.fmean(r["losses"][-width:]) for r in runs}
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        by_seed = {seed: loss for (name, seed), loss in last.items() if name == recipe}
        ratios = [
            100 * (loss / last["bf16", seed] - 1)
            for seed, loss in by_seed.items()
            if ("bf16", seed) in last
        ]
        gap = error = ""
        if recipe != "bf16" and len(ratios) > 1:
            gap = f"{statistics.fmean(ratios):+.2f}"
            error = f"{statistics.stdev(ratios) / len(ratios) ** 0.5:.2f}"
        table.add_row(
            recipe, str(len(by_seed)), f"{statistics.fmean(by_seed.values()):.4f}", gap, error
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Train what the file lacks, then print the gaps."""
    parser = records.parser(__doc__)
    parser.add_argument("--data-path", required=True, metavar="PREFIX")
    parser.add_argument("--tokenizer-model", required=True, metavar="DIR")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "examples" / "gpt-30m.args", metavar="FILE"
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=USUAL)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    args, others = parser.parse_known_args(argv)
    script = HYBRID if "--hybrid-layer-pattern" in args.model.read_text() else OURS
    common = [f"@{args.model}", "--data-path", args.data_path, "--bf16"]
    common += ["--tokenizer-model", args.tokenizer_model, *others]
    common += ["--log-interval", str(LOG_INTERVAL)]
    runs = records.read(args.output, "runs")
    done = {(run["recipe"], run["seed"]) for run in runs}
    for recipe in args.recipes:
        for seed in args.seeds:
            if (recipe, seed) in done:
                continue
            words = ["--precision-recipe", *RECIPES[recipe].split(), "--seed", str(seed)]
            losses = [step["lm_loss"] for step in train_here(script, [*common, *words])]
            runs.append({"recipe": recipe, "seed": seed, "losses": means(losses, LOG_INTERVAL)})
            records.write(args.output, {"log_interval": LOG_INTERVAL}, runs=runs)
    Console(width=120).print(gaps(runs, LOG_INTERVAL))
