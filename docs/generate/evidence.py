"""Store the runs of studies, and write their tables and pictures into docs/research/evidence.md.

    lowbit-study run examples/studies/nvfp4.yaml --output runs/nvfp4 --gpus 0 1 2 3 -- ...
    python docs/generate/evidence.py runs/nvfp4

A folder has the name of its study. Its finished runs replace runs of the same name and seed in
benchmarks/results/studies-h200.json; without folders the page is written from that file.

Studies of one model share runs with the same command but for the seed. Runs of other numbers of
tokens have no gap. "At the end" is the mean of the last twentieth of a run, "before the decay" of
its seventh and eighth tenth. Perplexity comes from the last validation; losses and perplexities
have their standard deviation over seeds.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from leaderboard import curve_of, finished_runs, shown_gap, split, stored_curve
from render import RESULTS, ROOT, parser, replace_sections
from render import table as markdown_table

from megatron_lowbit.analysis.comparison import Contender, Row, compare, final_loss, gaps
from megatron_lowbit.analysis.comparison_page import picture
from megatron_lowbit.analysis.loss_curve import LossCurve
from megatron_lowbit.study.definition import Study, jobs_of, read_study

STUDIES_FILE = RESULTS / "studies-h200.json"
PAGE = ROOT / "docs" / "research" / "evidence.md"
STUDIES = ROOT / "examples" / "studies"
REFERENCE = "NVFP4"
"""The row that others are compared with, besides the first one, and that branches start from."""


def collect(folder: Path) -> list[dict]:
    """Return the finished runs of a study's folder, with what it takes to draw and compare them."""
    return [
        {
            "name": state["name"],
            "seed": state["seed"],
            **{key: state["machine"][key] for key in ("gpu", "torch", "commit")},
            **stored_curve(curve),
            "validation_loss": round(float(curve.validation_losses[-1]), 5),
        }
        for state, curve in finished_runs(folder)
    ]


def merge(kept: Sequence[dict], new: Sequence[dict]) -> list[dict]:
    """Return runs by name and seed, the new ones in the place of the old."""
    runs = {(run["name"], run["seed"]): run for run in [*kept, *new]}
    return [runs[key] for key in sorted(runs)]


def restored(run: dict) -> LossCurve:
    """Restore a stored curve and its last validation."""
    curve, last = curve_of(run), np.array([run["validation_loss"]])
    return curve._replace(validation_iterations=curve.iterations[-1:], validation_losses=last)


def contenders_of(name: str, studies: dict[str, dict], kept: dict[str, list]) -> list[Contender]:
    """Return a study's runs, with runs of other studies that have the same command.

    ``studies`` has the commands of each by the names of its runs.
    """
    by_command: dict[tuple, dict[int, LossCurve]] = {}
    for other, commands in studies.items():
        for run in kept.get(other, []):
            if run["name"] in commands:
                by_command.setdefault(commands[run["name"]], {})[run["seed"]] = restored(run)
    runs = [(run, by_command.get(key, {})) for run, key in studies[name].items()]
    return [Contender(run, tuple(of.values()), tuple(of)) for run, of in runs if of]


def contenders_by_section(studies: dict[str, Study]) -> dict[str, list[Contender]]:
    """Return the runs of each section of the page."""
    kept = json.loads(STUDIES_FILE.read_text())
    commands = {name: commands_of(study) for name, study in studies.items()}
    return {name: contenders_of(name, commands, kept) for name in kept}


def commands_of(study: Study) -> dict[str, tuple]:
    """Return the recipe, other arguments and start of each run of a study, without its seed."""
    jobs = jobs_of(study.model_copy(update={"seeds": [1]}), Path(), [])
    return {job.name: (*map(tuple, split(job.command)), job.start) for job in jobs}


def table(rows: Sequence[Row], contenders: Sequence[Contender]) -> str:
    """Tabulate losses, gaps, their growth since before the decay, and the last validation."""
    seeds = [contender.seeds for contender in contenders]
    growth, validation = (
        gaps([[value(curve) for curve in contender.curves] for contender in contenders], seeds)
        for value in (_growth, lambda curve: curve.validation_losses[-1])
    )
    headings = ("", "runs", "final loss", "gap at the end", "growth in the decay",
                "validation gap", "perplexity")  # fmt: skip
    names = [row.name for row in rows]
    others = _gaps_to(REFERENCE, contenders) if REFERENCE in names[1:] else {}
    lines = []
    for row, *more in zip(rows, growth, validation, strict=True):
        is_compared = row is not rows[0] and not math.isnan(row.gap)
        pairs = [(row.gap, row.gap_error), *more] if is_compared else []
        lines.append([
            row.name,
            row.seeds,
            _spread(row.loss, row.loss_spread, 4),
            *([shown_gap(*pair) for pair in pairs] or ["", "", ""]),
            _spread(row.perplexity, row.perplexity_spread, 3),
            *([others.get(row.name, "")] if others else []),
        ])  # fmt: skip
    return markdown_table((*headings, *([f"relative to {REFERENCE}"] if others else [])), lines)


def _gaps_to(name: str, contenders: Sequence[Contender]) -> dict[str, str]:
    """Return the gaps at the end relative to a row of this name, by the names of the others."""
    rows = compare(sorted(contenders, key=lambda contender: contender.name != name))[1:]
    return {row.name: shown_gap(row.gap, row.gap_error) for row in rows if not math.isnan(row.gap)}


def text_of(section: str, contenders: Sequence[Contender]) -> str:
    """Return a section's text: losses by rate, switches by seed, or gaps and their picture."""
    if section == "mxnorm-lr":
        return by_rate(contenders)
    if section in ("healing", "nvfp4-branches"):
        names = [contender.name for contender in contenders]
        return by_seed(contenders[names.index(REFERENCE) :])
    rows = compare(contenders)
    image = f"![gaps of the study {section}](../images/{picture_of(section).name})"
    as_long = not any(math.isnan(row.gap) for row in rows)
    return "\n\n".join([table(rows, contenders), *([image] if as_long else [])])


def picture_of(section: str) -> Path:
    """Return the file of a section's picture."""
    return PAGE.parents[1] / "images" / f"evidence_{section}.png"


def by_seed(contenders: Sequence[Contender]) -> str:
    """Tabulate the relative differences of final losses to the first contender's, seed by seed.

    The last columns have their mean, and the mean of the last validation's, with standard errors.
    """
    seeds = sorted(set.intersection(*(set(contender.seeds) for contender in contenders)))
    values = np.array([
        [(final_loss(curves[seed]), curves[seed].validation_losses[-1]) for seed in seeds]
        for curves in (dict(zip(one.seeds, one.curves, strict=True)) for one in contenders)
    ])  # fmt: skip
    shares = values[1:] / values[0] - 1
    errors = shares.std(axis=1, ddof=1) / math.sqrt(len(seeds))
    lines = [
        [one.name, *(f"{100 * share:+.3f}%" for share in of[:, 0]),
         *(f"{100 * mean:+.3f}% ± {100 * error:.3f}"
           for mean, error in zip(of.mean(axis=0), error_of, strict=True))]
        for one, of, error_of in zip(contenders[1:], shares, errors, strict=True)
    ]  # fmt: skip
    headings = ("", *(f"seed {seed}" for seed in seeds), "mean", "validation")
    return markdown_table(headings, lines)


def by_rate(contenders: Sequence[Contender]) -> str:
    """Tabulate final losses of runs named "NORM, RATE": a line for each rate."""
    cells = {
        tuple(row.name.split(", ")): _spread(row.loss, row.loss_spread, 3)
        for row in compare(contenders)
    }
    norms, rates = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    lines = [[rate, *(cells[norm, rate] for norm in norms)] for rate in rates]
    return markdown_table(("learning rate", *norms), lines)


def _spread(mean: float, deviation: float, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if np.isnan(deviation) else f" ± {deviation:.{digits}f}")


def _growth(curve: LossCurve) -> float:
    share = curve.iterations / curve.iterations[-1]
    return final_loss(curve) / float(curve.losses[(share > 0.6) & (share <= 0.8)].mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Collect the folders that the command line names, then write the page."""
    made = parser(__doc__)
    made.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    args = made.parse_args(argv)
    studies = {file.stem: read_study(file) for file in sorted(STUDIES.glob("*.yaml"))}
    kept = json.loads(STUDIES_FILE.read_text()) if STUDIES_FILE.is_file() else {}
    for folder in args.folders:
        if folder.name not in studies:
            made.error(f"{folder}: no study in {STUDIES} has this name")
        new = collect(folder)
        kept[folder.name] = merge(kept.get(folder.name, []), new)
    if args.folders:
        STUDIES_FILE.write_text(json.dumps(kept) + "\n")
    sections = contenders_by_section(studies)
    texts = {name: text_of(name, found) for name, found in sections.items()}
    for name, found in sections.items():
        if picture_of(name).name in texts[name]:
            picture_of(name).write_bytes(picture(found))
    replace_sections(PAGE, texts)


if __name__ == "__main__":
    main()
