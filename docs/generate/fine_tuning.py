"""Store the benefit of quantization-aware training, and write it into docs/finetune-and-serve.md.

    lowbit-study run examples/studies/qat.yaml --output runs/qat --gpus 0 1 -- ...
    python docs/generate/fine_tuning.py runs/qat

The folder's finished runs go into benchmarks/results/studies-qat.json; without one the page is
written from that file. Differences are paired seed by seed, with their standard errors.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from evidence import collect
from render import RESULTS, ROOT, parser, render, replace_sections

KEPT = RESULTS / "studies-qat.json"
PAGE = ROOT / "docs" / "finetune-and-serve.md"
FORMATS = {"NVFP4": "qat-nvfp4-activations", "MXFP4": "qat-mxfp4-activations"}
BASELINE, AFTER, DURING = "BF16", "after training", "in training"


def difference(losses: dict[tuple[str, int], float], name: str, other: str) -> str:
    """Return the mean difference of two runs' losses, paired by seed, and its standard error."""
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
    return render(
        "fine-tuning-gain", loss=statistics.mean(baseline), spread=statistics.stdev(baseline),
        first=next(run for run in runs if run["name"] == BASELINE), rows=rows,
        headings=("", f"{AFTER}, to BF16", f"{DURING}, to BF16", f"{DURING}, to after"),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folder that the command line names, then write the page."""
    made = parser(__doc__)
    made.add_argument("folder", nargs="?", type=Path)
    args = made.parse_args(argv)
    if args.folder:
        runs = collect(args.folder)
        curve = ("every", "losses")
        lines = [json.dumps({k: run[k] for k in run if k not in curve}) for run in runs]
        KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    replace_sections(PAGE, {"gain": section_of(json.loads(KEPT.read_text()))})


if __name__ == "__main__":
    main()
