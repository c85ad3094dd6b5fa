"""Set the planner's figures beside all that was measured so far, in docs/planning.md.

    python docs/generate/planning.py

Reads what plan_check.py measured, and model.py's whole models, from benchmarks/results; renews what
stands between the page's markers, also what is calculated for large clusters.
"""

import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import yaml
from render import RESULTS, ROOT, parser, replace_sections, table
from results import KINDS, OWN_FP8, read_steps

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

GPUS_PER_NODE = 8


def planned(
    words: Sequence[str], gpus: int, vocabulary: int, kind: str, scan: str, accumulate: bool = True
) -> Estimate:
    """Return the planner's figures of training's arguments as they are."""
    args = TrainingArguments(_here(words)).parse(gpus)
    device = Device(gpu(kind), args.transformer_impl == "transformer_engine", scan, accumulate)
    return _plans([(layout_of(args, gpus), args)], vocabulary, device)[0]


def _here(words: Sequence[str]) -> list[str]:
    return [word.replace("@examples", f"@{ROOT}/examples") for word in words]


def _plans(tried: list[Candidate], vocabulary: int, device: Device) -> list[Estimate]:
    _, args = tried[0]
    recipes = load_recipes(args.precision_recipe, args.recipe_set)
    return plan(tried, recipes, vocabulary, device)


def kind_of(name: str) -> str:
    """Return the planner's name of a GPU; an unknown one is an H200."""
    return next((kind for kind in ("h100", "h200", "b200") if kind.upper() in name), "h200")


def body(results: Path) -> str | None:
    """Return figures measured with this version of Megatron-LM; None where there are none."""
    parts = []
    for data in _current(sorted(results.glob("plan_check-*.json"))):
        if data["machine"]["gpu"] != "none":  # tried out on a CPU
            parts += [_origin(data), _runs(data)]
    for data in _current([results / "model-h200.json"]):
        title = (
            "Forward and backward of four layers of Llama-3-8B, 4 sequences of 4096 tokens, "
            f"without an optimizer (`python -m benchmarks model`), one {data['machine']['gpu']}:"
        )
        parts += [title, _layers(data)]
    return "\n\n".join(parts) or None


def _current(files: Iterable[Path]) -> list[dict]:
    """Return the contents of files of the installed Megatron-LM; plans describe no other."""
    found = [json.loads(file.read_text()) for file in files if file.is_file()]
    return [x for x in found if x["machine"]["megatron_core"] == version("megatron-core")]


def _origin(data: dict) -> str:
    machine = data["machine"]
    gpus = data.get("gpus", machine.get("gpus"))
    return (
        f"{ITERATIONS} iterations of training on {gpus} {machine['gpu']}, torch "
        f"{machine['torch']}, {machine['date']}, commit {machine['commit'][:12]}; the speed is the "
        f"median of the last {COUNTED}, the memory that of the rank which took most:"
    )


HEADINGS = ("GiB planned", "measured", "off", "ms a step, planned", "measured", "off")


def _runs(data: dict) -> str:
    lines, failed = [], []
    for row in data["rows"]:
        name = [row[key] for key in NAME]
        if why := row.get("failed", row.get("error")):
            failed.append(f"- {', '.join(name)}: {why}")
            continue
        kind, scan = kind_of(data["machine"]["gpu"]), row.get("scan", "mamba-ssm")
        found = planned(row["arguments"], row["gpus"], row["vocabulary"], kind, scan)
        cells = _beside(found, 2**30, max(row["memory_gib"]), row["tokens_per_s"])
        lines.append([*name, *cells])
    shown = table((*NAME, *HEADINGS), lines)
    return "\n\n".join([shown, "\n".join(["Failed:", "", *failed])] if failed else [shown])


def _layers(data: dict) -> str:
    lines = []
    for row in data["rows"]:
        contender = CONTENDERS[row["contender"]]
        # Plans are of Transformer Engine's layers, and of recipes of this project.
        if IN_TE[1] not in contender.arguments or "--fp8-format" in contender.arguments:
            continue
        words = [*MODEL, *contender.arguments]
        found = planned(words, 1, VOCABULARY, "h200", "mamba-ssm", accumulate=False)
        lines.append([row["contender"], *_beside(found, 1e9, row["peak_gb"], row["tokens_per_s"])])
    return table(("recipe", "GB planned", *HEADINGS[1:]), lines)


def _beside(found: Estimate, unit: float, memory: float, speed: float) -> list[str]:
    most, planned_s, measured_s = found.most_memory / unit, found.step, found.tokens / speed
    return [
        f"{most:.2f}", f"{memory:.2f}", f"{most / memory - 1:+.1%}",
        f"{1e3 * planned_s:.1f}", f"{1e3 * measured_s:.1f}", f"{planned_s / measured_s - 1:+.1%}",
    ]  # fmt: skip


TABLES = yaml.safe_load((ROOT / "docs" / "templates" / "planning.yaml").read_text())
CLUSTERS: dict[str, dict] = TABLES["clusters"]


def short_steps(results: Path) -> str:
    """Return plans of megatron_lm.py's steps beside the fastest median of each case."""
    arguments = {case.name: case.arguments for case in megatron_lm.CASES}
    lines = []
    for file, names in TABLES["short_steps"].items():
        data = json.loads((results / f"{file}.json").read_text())
        kind = file.rpartition("-")[2].removeprefix("2x")
        done = [row for row in data["rows"] if "median_ms" in row]
        for name in names or dict.fromkeys(row["case"] for row in done):
            words = [*data["model"], *megatron_lm.COMMON, *arguments[name]]
            step = 1e3 * planned(words, data["machine"]["gpus"], 32000, kind, "mamba-ssm").step
            measured = min(row["median_ms"] for row in done if row["case"] == name)
            off = f"{step / measured - 1:+.1%}"
            lines.append([kind.upper(), name, f"{step:.1f}", f"{measured:.1f}", off])
    return table(("GPU", "case", "ms a step, planned", "measured", "off"), lines)


def long_steps(results: Path) -> str:
    """Return plans of flagship.py's steps beside what was measured.

    Models that have cases in CUDA graphs count with those alone: other steps depend on the CPU.
    Their memory is left out, since PyTorch does not count what graphs keep. So is Megatron-LM's own
    FP8, which plans take for this project's tiles.
    """
    lines = []
    for kind in KINDS:
        if (found := read_steps(results, kind)) is None:
            continue
        for case in flagship.cases():
            row = found.rows.get((case.model, case.precision, case.graphs), {"error": ""})
            graphs = flagship.MODELS[case.model].get("graphs")
            if "error" in row or (graphs and not case.graphs) or case.precision == OWN_FP8:
                continue
            words = flagship.words_of(case, 1)
            vocabulary = int(words[words.index("--vocab-size") + 1])
            one = planned(words, 1, vocabulary, kind, "mamba-ssm")
            cells = _beside(one, 2**30, row["peak_gib"], row["tokens_per_s"])
            memory = [""] * 3 if graphs else cells[:3]
            lines.append([kind.upper(), case.name, *cells[3:], *memory])
    return table(("GPU", "case", *HEADINGS[3:], *HEADINGS[:3]), lines)


def calculated(preset: str) -> str:
    """Return the fastest layout of a preset on each of its clusters."""
    declared, lines = CLUSTERS[preset], []
    for number, kind, recipe in map(str.split, declared["plans"]):
        gpus, device = int(number), Device(gpu(kind))
        words = [f"@{ROOT}/examples/{preset}.args", "--precision-recipe", recipe]
        words += declared.get("arguments", "").split()
        tried, _ = candidates(TrainingArguments(words), gpus, GPUS_PER_NODE)
        found = _plans(tried, declared["vocabulary"], device)
        fitting = [one for one in found if one.most_memory <= device.usable_bytes]
        best = max(fitting, key=lambda one: one.tokens_per_second)
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
                "tokens/s of a GPU", "MFU", "days")  # fmt: skip
    return table(headings, lines)


COMMON = (
    "--precision-recipe fp8-tensorwise --seq-length 8192 --max-position-embeddings 8192 "
    "--micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --grad-reduce-in-bf16 --cross-entropy-loss-fusion"
)
PUBLISHED = (
    ("llama3-8b", 8, 14451, "--global-batch-size 128 --recompute-granularity full "
     "--recompute-method block --recompute-num-layers 5"),
    ("llama3-70b", 64, 1664, "--global-batch-size 256 --tensor-model-parallel-size 4 "
     "--sequence-parallel --pipeline-model-parallel-size 8 "
     "--num-layers-per-virtual-pipeline-stage 2"),
)  # fmt: skip
"""Presets, H100s, tokens a second of a GPU and layouts of Megatron-Bridge's performance summary."""


def published() -> str:
    """Return plans beside published figures, and the same without one of their terms each."""
    lines = []
    for preset, gpus, speed, layout in PUBLISHED:
        words = [f"@examples/{preset}.args", *COMMON.split(), *layout.split()]
        found = planned(words, gpus, 128256, "h100", "mamba-ssm")
        words.append("--no-gradient-accumulation-fusion")
        apart = planned(words, gpus, 128256, "h100", "mamba-ssm")
        hidden = found.step - found.seconds.get("tensor parallel", 0.0)
        seconds = (found.step, apart.step, hidden)
        rates = [found.tokens / step / gpus for step in seconds]
        cells = [f"{rate:,.0f} ({rate / speed - 1:+.1%})" for rate in rates]
        lines.append([f"`{preset}`", gpus, f"{speed:,}", *cells])
    headings = ("preset", "H100s", "published", "planned", "without fused accumulation",
                "tensor parallelism's collectives hidden")  # fmt: skip
    return table(headings, lines)


def write_page(document: Path, results: Path) -> None:
    """Write the page's sections between their markers."""
    sections = {preset: calculated(preset) for preset in CLUSTERS} | {
        "published": published(),
        "short-steps": short_steps(results),
        "long-steps": long_steps(results),
    }
    if (measured := body(results)) is not None:
        sections["measured"] = measured
    replace_sections(document, sections)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    made = parser(__doc__, document=ROOT / "docs" / "planning.md", results=RESULTS)
    args = made.parse_args(argv)
    write_page(args.document, args.results)


if __name__ == "__main__":
    main()
