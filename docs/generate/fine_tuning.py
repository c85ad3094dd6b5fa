"""Keep what quantization-aware training gained, and write its table into docs/fine-tuning.md.

    lowbit-study run examples/studies/qat.yaml --output runs/qat --gpus 0 1 -- ...
    python docs/generate/fine_tuning.py runs/qat

The folder's finished runs go into benchmarks/results/studies-qat.json; without one the page is
written from that file alone. Differences are paired seed by seed, with their standard errors.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from evidence import STUDIES, collect
from markdown import RESULTS, ROOT, replace_sections
from markdown import table as markdown_table

from megatron_lowbit.study.definition import read_study

KEPT = RESULTS / "studies-qat.json"
PAGE = ROOT / "docs" / "fine-tuning.md"
FORMATS = {"NVFP4": "qat-nvfp4-activations", "MXFP4": "qat-mxfp4-activations"}
BASELINE, AFTER, DURING = "BF16", "after training", "in training"
TEXT = """Four seeds of the 20M-parameter GPT were trained in BF16 on {tokens} tokens of C source.
Weights and inputs of all blocks were quantized either after training, or in its last quarter.
Validation losses (1.0M tokens, all as they would be served; the mean over seeds of BF16's
{loss:.4f} has a standard deviation of {spread:.4f}) have these differences, paired seed by seed,
with their standard errors:

{table}

{gpu}, torch {torch}, commit {commit} (`benchmarks/results/studies-qat.json`)."""


def difference(losses: dict[tuple[str, int], float], name: str, other: str) -> str:
    """Return how much larger the losses of one run are than another's, of the same seeds."""
    seeds = sorted(seed for run, seed in losses if run == name)
    gaps = [losses[name, seed] - losses[other, seed] for seed in seeds]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{statistics.mean(gaps):+.4f} ± {error:.4f}"


def section_of(runs: Sequence[dict]) -> str:
    """Return the page's text about these runs."""
    losses = {(run["name"], run["seed"]): run["validation_loss"] for run in runs}
    rows = []
    for format, recipe in FORMATS.items():
        after, during = f"{format} {AFTER}", f"{format} {DURING}"
        pairs = (after, BASELINE), (during, BASELINE), (during, after)
        rows.append([f"`{recipe}`", *(difference(losses, *pair) for pair in pairs)])
    baseline = [loss for (name, _), loss in losses.items() if name == BASELINE]
    first = next(run for run in runs if run["name"] == BASELINE)
    headings = ("", f"{AFTER}, to BF16", f"{DURING}, to BF16", f"{DURING}, to after")
    return TEXT.format(
        tokens=f"{first['tokens'] / 1e6:.0f}M",
        loss=statistics.mean(baseline),
        spread=statistics.stdev(baseline),
        table=markdown_table(headings, rows),
        gpu=first["gpu"],
        torch=first["torch"],
        commit=first["commit"][:7],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folder that the command line names, then write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    args = parser.parse_args(argv)
    if args.folder:
        runs = collect(args.folder, read_study(STUDIES / "qat.yaml"))
        curve = ("every", "losses")
        lines = [json.dumps({k: run[k] for k in run if k not in curve}) for run in runs]
        KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    replace_sections(PAGE, {"gain": section_of(json.loads(KEPT.read_text()))})


if __name__ == "__main__":
    main()
