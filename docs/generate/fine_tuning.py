"""Store the studies of quantization-aware training and distillation, and write their tables.

    lowbit-study run examples/studies/qat.yaml --output runs/qat --gpus 0 1 -- ...
    python docs/generate/fine_tuning.py runs/qat

A folder is named after its study, qat or qad. Its finished runs go into
benchmarks/results/studies-NAME.json; without a folder the pages are written from these files.
Differences are paired seed by seed, with their standard errors.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from leaderboard import finished_runs
from render import RESULTS, ROOT, parser, render, replace_sections

FORMATS = {"NVFP4": "qat-nvfp4-activations", "MXFP4": "qat-mxfp4-activations"}
BASELINE, AFTER, DURING = "BF16", "after training", "in training"
CONTINUED, METHODS = "BF16 continued", ("PTQ", "QAT", "QAD")


def collect(folder: Path) -> list[dict]:
    """Return the last validation of each finished run of a study's folder."""
    return [
        {
            "name": state["name"],
            "seed": state["seed"],
            **{key: state["machine"][key] for key in ("cpu", "gpu", "torch", "commit")},
            "tokens": int(curve.tokens[-1]),
            "validation_loss": round(float(curve.validation_losses[-1]), 5),
        }
        for state, curve in finished_runs(folder)
    ]


def losses_of(runs: Sequence[dict]) -> dict[tuple[str, int], float]:
    """Return the validation losses of runs, by name and seed."""
    return {(run["name"], run["seed"]): run["validation_loss"] for run in runs}


def difference(losses: dict[tuple[str, int], float], name: str, other: str) -> str:
    """Return the mean difference of two runs' losses, paired by seed, and its standard error."""
    seeds = sorted(seed for run, seed in losses if run == name)
    gaps = [losses[name, seed] - losses[other, seed] for seed in seeds]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{statistics.mean(gaps):+.4f} ± {error:.4f}"


def _rendered(template: str, runs: Sequence[dict], **values: object) -> str:
    baseline = [loss for (name, _), loss in losses_of(runs).items() if name == BASELINE]
    return render(
        template, loss=statistics.mean(baseline), spread=statistics.stdev(baseline),
        first=next(run for run in runs if run["name"] == BASELINE), **values,
    )  # fmt: skip


def gain(runs: Sequence[dict]) -> str:
    """Return the text about quantization after training and in training."""
    losses, rows = losses_of(runs), []
    for format, recipe in FORMATS.items():
        after, during = f"{format} {AFTER}", f"{format} {DURING}"
        pairs = (after, BASELINE), (during, BASELINE), (during, after)
        rows.append([f"`{recipe}`", *(difference(losses, *pair) for pair in pairs)])
    headings = ("", f"{AFTER} minus BF16", f"{DURING} minus BF16", f"{DURING} minus {AFTER}")
    return _rendered("fine-tuning-gain", runs, rows=rows, headings=headings)


def distillation(runs: Sequence[dict]) -> str:
    """Return the text about PTQ, QAT and QAD."""
    losses, others = losses_of(runs), (BASELINE, METHODS[0], CONTINUED)
    rows = [
        [name, *("" if name == other else difference(losses, name, other) for other in others)]
        for name in (*METHODS, CONTINUED)
    ]
    headings = ("", "minus the teacher", f"minus {METHODS[0]}", f"minus {CONTINUED}")
    last = next(run for run in runs if run["name"] == CONTINUED)
    return _rendered("distillation-gain", runs, rows=rows, headings=headings, last=last)


STUDIES = {
    "qat": (ROOT / "docs" / "finetune-and-serve.md", "gain", gain),
    "qad": (ROOT / "docs" / "recipes" / "qat.md", "distillation", distillation),
}
"""Page and section of each study's text, and the function that writes it."""


def kept(study: str) -> list[dict]:
    """Return the stored runs of a study."""
    return json.loads((RESULTS / f"studies-{study}.json").read_text())


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folder that the command line names, then write the pages."""
    made = parser(__doc__)
    made.add_argument("folder", nargs="?", type=Path)
    args = made.parse_args(argv)
    if args.folder:
        if args.folder.name not in STUDIES:
            made.error(f"{args.folder}: the folder's name must be one of {', '.join(STUDIES)}")
        lines = map(json.dumps, collect(args.folder))
        file = RESULTS / f"studies-{args.folder.name}.json"
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    for study, (page, section, text_of) in STUDIES.items():
        replace_sections(page, {section: text_of(kept(study))})


if __name__ == "__main__":
    main()
