"""Write plans of known models into docs/planning.md, and their comparisons into research/plans.md.

    python docs/generate/planning.py

Reads what plan_check.py measured, and model.py's whole models, from benchmarks/results; renews what
stands between the page's markers, also what is calculated for large clusters.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from render import RESULTS, ROOT, parser, render, replace_sections, table
from steps import KINDS, SEVERAL, card_of, read_steps

from megatron_lowbit.command_line import expand_files
from megatron_lowbit.planning.device import Device
from megatron_lowbit.planning.estimate import Estimate
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import Candidate, candidates, layout_of
from megatron_lowbit.planning.search import plan
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import load_recipes

# isort: split
from benchmarks import flagship, megatron_lm
from benchmarks.model import CONTENDERS, IN_TE, MODEL, VOCABULARY
from benchmarks.plan_check import COUNTED, ITERATIONS, NAME
from benchmarks.records import current
from benchmarks.training_steps import from_root

GPUS_PER_NODE = 8


def planned(
    words: Sequence[str],
    gpus: int,
    vocabulary: int,
    card: str,
    scan: str,
    accumulate: bool = True,
) -> Estimate:
    """Return the planner's figures of training's arguments as they are."""
    args = TrainingArguments(from_root(words)).parse(gpus)
    device = Device(gpu(card), args.transformer_impl == "transformer_engine", scan, accumulate)
    return _plans([(layout_of(args, gpus), args)], vocabulary, device)[0]


def _plans(tried: list[Candidate], vocabulary: int, device: Device) -> list[Estimate]:
    _, args = tried[0]
    recipes = load_recipes(args.precision_recipe, args.recipe_set)
    return plan(tried, recipes, vocabulary, device)


def kind_of(name: str) -> str:
    """Return the planner's name of a GPU; an unknown one is an H200."""
    return next((card for card in ("h100", "h200", "b200") if card.upper() in name), "h200")


def body(results: Path) -> str | None:
    """Return figures measured with this version of Megatron-LM; None where there are none."""
    runs = [
        (data, *_runs(data))
        for data in current(results.glob("plan_check-*.json"))
        if data["machine"]["gpu"] != "none"  # tried out on a CPU
    ]
    models = [(data, _layers(data)) for data in current(results.glob("model-h200.json"))]
    measured = {"iterations": ITERATIONS, "counted": COUNTED, "names": NAME, "headings": HEADINGS}
    text = render("planning-measured", runs=runs, models=models, **measured)
    return text.strip() or None


HEADINGS = ("GiB planned", "measured", "off", "ms per step, planned", "measured", "off")


def _runs(data: dict) -> tuple[list[list[str]], list[str]]:
    lines, failed = [], []
    for row in data["rows"]:
        name = [row[key] for key in NAME]
        if why := row.get("error"):
            failed.append(f"{', '.join(name)}: {why}")
            continue
        card, scan = kind_of(data["machine"]["gpu"]), row.get("scan", "mamba-ssm")
        estimate = planned(row["arguments"], row["gpus"], row["vocabulary"], card, scan)
        cells = _beside(estimate, 2**30, max(row["memory_gib"]), row["tokens_per_s"])
        lines.append([*name, *cells])
    return lines, failed


def _layers(data: dict) -> list[list[str]]:
    lines = []
    for row in data["rows"]:
        contender = CONTENDERS[row["contender"]]
        # Plans are of Transformer Engine's layers, and of recipes of this project.
        if IN_TE[1] not in contender.arguments or "--fp8-format" in contender.arguments:
            continue
        words = [*MODEL, *contender.arguments]
        estimate = planned(words, 1, VOCABULARY, "h200", "mamba-ssm", accumulate=False)
        cells = _beside(estimate, 1e9, row["peak_gb"], row["tokens_per_s"])
        lines.append([row["contender"], *cells])
    return lines


def _beside(estimate: Estimate, unit: float, memory: float, speed: float) -> list[str]:
    planned_memory, planned_s = estimate.most_memory / unit, estimate.step
    measured_s = estimate.tokens / speed
    return [
        f"{planned_memory:.2f}", f"{memory:.2f}", f"{planned_memory / memory - 1:+.1%}",
        f"{1e3 * planned_s:.1f}", f"{1e3 * measured_s:.1f}", f"{planned_s / measured_s - 1:+.1%}",
    ]  # fmt: skip


TABLES = yaml.safe_load((ROOT / "docs" / "templates" / "planning.yaml").read_text())
CLUSTERS: dict[str, dict] = TABLES["clusters"]


def short_steps(results: Path) -> str:
    """Return plans of megatron_lm.py's steps and the fastest median of each case."""
    arguments = {case.name: case.arguments for case in megatron_lm.CASES}
    lines = []
    for file, names in TABLES["short_steps"].items():
        data = json.loads((results / f"{file}.json").read_text())
        card = file.rpartition("-")[2].removeprefix("2x")
        done = [row for row in data["rows"] if "median_ms" in row]
        for name in names or dict.fromkeys(row["case"] for row in done):
            words = [*data["model"], *megatron_lm.COMMON, *arguments[name]]
            step = 1e3 * planned(words, data["machine"]["gpus"], 32000, card, "mamba-ssm").step
            measured = min(row["median_ms"] for row in done if row["case"] == name)
            off = f"{step / measured - 1:+.1%}"
            lines.append([card.upper(), name, f"{step:.1f}", f"{measured:.1f}", off])
    return table(("GPU", "case", "ms per step, planned", "measured", "off"), lines)


def long_steps(results: Path) -> str:
    """Return plans of flagship.py's steps and what was measured.

    Models that were measured in CUDA graphs count only with those: other steps depend on the CPU.
    Their memory is omitted, since PyTorch does not count what graphs keep, and so is Megatron-LM's
    FP8, which plans treat as this project's tiles.
    """
    lines = []
    for kind in (*KINDS, *SEVERAL):
        if (steps := read_steps(results, kind)) is None:
            continue
        for case in flagship.cases():
            row = steps.rows.get((case.model, case.precision, case.graphs), {"error": ""})
            graphs = any(model == case.model and in_graphs for model, _, in_graphs in steps.rows)
            own_fp8 = "--fp8-format" in case.arguments
            if "error" in row or (graphs and not case.graphs) or own_fp8:
                continue
            words = expand_files(from_root(flagship.words_of(case, 1)))
            vocabulary = int(words[words.index("--vocab-size") + 1])
            estimate = planned(words, case.gpus, vocabulary, card_of(kind), "mamba-ssm")
            speed = case.gpus * row["tokens_per_s"]
            cells = _beside(estimate, 2**30, row["peak_gib"], speed)
            memory = [""] * 3 if graphs else cells[:3]
            gpus = kind.upper().replace("X", " x ")
            lines.append([gpus, case.name, *cells[3:], *memory])
    return table(("GPU", "case", *HEADINGS[3:], *HEADINGS[:3]), lines)


def calculated(preset: str) -> str:
    """Return the fastest layout of a preset on each of its clusters."""
    declared, lines = CLUSTERS[preset], []
    for number, card, recipe in map(str.split, declared["plans"]):
        gpus, device = int(number), Device(gpu(card))
        words = [f"@{ROOT}/examples/{preset}.args", "--precision-recipe", recipe]
        words += declared.get("arguments", "").split()
        tried, _ = candidates(TrainingArguments(words), gpus, GPUS_PER_NODE)
        estimates = _plans(tried, declared["vocabulary"], device)
        fitting = [x for x in estimates if x.most_memory <= device.usable_bytes]
        best = max(fitting, key=lambda x: x.tokens_per_second)
        run = best.args.train_iters * best.args.global_batch_size * best.args.seq_length
        layout = best.layout
        ranks = f"{layout.tensor} x {layout.pipeline} x {layout.data}"
        lines.append([
            f"{gpus} x {device.gpu.name.removeprefix('NVIDIA ')}", f"`{recipe}`", ranks,
            layout.virtual, f"{layout.micro_batch} x {layout.microbatches}", layout.recompute,
            f"{best.most_memory / 2**30:.0f}", f"{best.tokens_per_second / gpus:,.0f}",
            f"{best.utilisation(device):.1%}", f"{run / best.tokens_per_second / 86400:,.0f}",
        ])  # fmt: skip
    headings = ("GPUs", "recipe", "TP x PP x DP", "VP", "micro batch x number", "recomputed", "GiB",
                "tokens/s per GPU", "MFU", "days")  # fmt: skip
    return table(headings, lines)


def published() -> str:
    """Return plans and published figures, and the same without one of their terms each."""
    lines = []
    declared = TABLES["published"]
    for preset, gpus, speed, layout in declared["figures"]:
        words = [f"@examples/{preset}.args", *declared["arguments"].split(), *layout.split()]
        estimate = planned(words, gpus, 128256, "h100", "mamba-ssm")
        words.append("--no-gradient-accumulation-fusion")
        apart = planned(words, gpus, 128256, "h100", "mamba-ssm")
        hidden = estimate.step - estimate.seconds.get("tensor parallel", 0.0)
        seconds = (estimate.step, apart.step, hidden)
        rates = [estimate.tokens / step / gpus for step in seconds]
        cells = [f"{rate:,.0f} ({rate / speed - 1:+.1%})" for rate in rates]
        lines.append([f"`{preset}`", gpus, f"{speed:,}", *cells])
    headings = ("preset", "H100s", "published", "planned", "without fused accumulation",
                "tensor parallelism's collectives hidden")  # fmt: skip
    return table(headings, lines)


def write_comparisons(document: Path, results: Path) -> None:
    """Write the comparisons with measured and published figures between their markers."""
    sections = {
        "published": published(),
        "short-steps": short_steps(results),
        "long-steps": long_steps(results),
    }
    if (measured := body(results)) is not None:
        sections["measured"] = measured
    replace_sections(document, sections)


def main(argv: Sequence[str] | None = None) -> None:
    """Write both pages."""
    docs = ROOT / "docs"
    made = parser(
        __doc__, document=docs / "planning.md", comparisons=docs / "research" / "plans.md",
        results=RESULTS,
    )  # fmt: skip
    args = made.parse_args(argv)
    replace_sections(args.document, {preset: calculated(preset) for preset in CLUSTERS})
    write_comparisons(args.comparisons, args.results)


if __name__ == "__main__":
    main()
