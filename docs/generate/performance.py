"""Write what linear.py, quantize.py and model.py measured on a GPU into docs/performance.md.

    python docs/generate/performance.py

Reads benchmarks/results/{linear,quantize,model}-GPU.json, as many of them as there are, and
replaces what stands between the page's markers: a table for each benchmark, and a picture of the
linear layer's times.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from markdown import RESULTS, ROOT, replace_sections, table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MISSING = "not measured yet"
PHASES = ("forward", "backward", "both")


class Results:
    """The benchmarks' JSON files of one GPU; a benchmark without one has no rows."""

    def __init__(self, folder: Path, gpu: str) -> None:
        files = {name: folder / f"{name}-{gpu}.json" for name in ("linear", "quantize", "model")}
        self.data = {
            name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()
        }

    def rows(self, benchmark: str) -> list[dict]:
        """Return all rows, those of the first size first."""
        return self.data[benchmark]["rows"] if benchmark in self.data else []

    def sizes(self, benchmark: str) -> list[list[int]]:
        """Return the sizes measured."""
        return [
            list(size) for size in dict.fromkeys(tuple(r["size"]) for r in self.rows(benchmark))
        ]

    def row(self, benchmark: str, contender: str) -> dict:
        """Return a contender's row of the first size, empty if it was not measured or refused."""
        found = (row for row in self.rows(benchmark) if row["contender"] == contender)
        row = next(found, {})
        return {} if "refused" in row else row


KEPT = "kept_bytes_per_input_element"


def _time(spread: dict) -> str:
    return f"{spread['median_ms']:.3f} ± {spread['iqr_ms']:.3f}"


def _refusals(rows: Iterable[dict]) -> str:
    """Return a line for each contender that was not measured."""
    refused = [f"- {row['contender']}: {row['refused']}" for row in rows if "refused" in row]
    return "\n".join(["Not measured:", "", *refused]) if refused else ""


def _origin(data: dict) -> str:
    """Describe where and with what a benchmark ran, and what the device reached there."""
    machine, limits = data["machine"], data["ceilings"]
    gemms = [f"{name} {rate:.0f}" for name, rate in limits["gemm_tflop_per_s"].items()]
    gemms += [f"{name}: {why}" for name, why in limits["refused"].items()]
    return (
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, Triton "
        f"{machine['triton']}, Transformer Engine {machine['transformer_engine']}, torchao "
        f"{machine['torchao']}; {machine['date']}, commit {machine['commit'][:12] or 'unknown'}. "
        f"Engine of the recipes: {data['engine']}. Ceilings of the run: copy "
        f"{limits['copy_tb_per_s']:.2f} TB/s, read and written; GEMMs in TFLOP/s: "
        f"{', '.join(gemms)}."
    )


def linear(results: Results, picture: str) -> str:
    """Describe the linear layer: one table of its first size, one of all sizes."""
    first, *more = results.sizes("linear")
    rows = [row for row in results.rows("linear") if row["size"] == first]
    lines = [
        [
            row["contender"],
            *(_time(row[phase]) for phase in PHASES),
            *(row.get(key, {}).get("both") for key in ("times_bf16", "times_te_blockwise")),
            row["tflop_per_s"],
            row.get("over_bound", {}).get("both"),
            row.get(KEPT),
        ]
        for row in rows
        if "refused" not in row
    ]
    headings = (
        "", "forward, ms", "backward, ms", "both, ms", "× BF16", "× TE blockwise", "TFLOP/s",
        "over bound", "bytes kept an input element",
    )  # fmt: skip
    title = f"{first[0]} tokens, {first[1]} → {first[2]}."
    parts = [title, f"![Times of a linear layer]({picture})", table(headings, lines)]
    parts.append(_refusals(rows))
    if more:
        title = "Forward and backward, times as fast as BF16, by size (empty: not measured there):"
        parts += [title, _by_size(results, "times_bf16")]
    return "\n\n".join(filter(None, parts))


def _by_size(results: Results, key: str) -> str:
    """Tabulate one figure of each contender (a column) at each size (a row)."""
    names = list(dict.fromkeys(row["contender"] for row in results.rows("linear")))
    known = {
        (tuple(row["size"]), row["contender"]): row.get(key, {}).get("both")
        for row in results.rows("linear")
    }
    lines = [
        [f"{size[0]} × {size[1]} → {size[2]}", *(known.get((tuple(size), name)) for name in names)]
        for size in results.sizes("linear")
    ]
    return table(["", *names], lines)


def quantize(results: Results) -> str:
    """Describe quantization alone: a table for each size."""
    parts = []
    headings = ("", "makes", "ms", "TB/s", "of a copy", "with the amax pass")
    for size in results.sizes("quantize"):
        rows = [row for row in results.rows("quantize") if row["size"] == size]
        lines = [
            [
                row["contender"], row["makes"], _time(row), row["tb_per_s"], row["of_copy"],
                row["of_copy_with_amax"],
            ]
            for row in rows
            if "refused" not in row
        ]  # fmt: skip
        parts += [f"{size[0]} × {size[1]}:", table(headings, lines), _refusals(rows)]
    return "\n\n".join(filter(None, parts))


def model(results: Results) -> str:
    """Describe the whole model."""
    rows = results.rows("model")
    lines = [
        [
            row["contender"], _time(row["both"]), row["tokens_per_s"], row.get("times_te_bf16"),
            row["peak_gb"], row["tflop_per_s"], row["of_bf16_gemm"], row.get("over_bound"),
        ]
        for row in rows
        if "refused" not in row
    ]  # fmt: skip
    headings = (
        "", "ms", "tokens/s", "× TE BF16", "peak GB", "TFLOP/s", "of a BF16 GEMM", "over bound",
    )  # fmt: skip
    return "\n\n".join(filter(None, [table(headings, lines), _refusals(rows)]))


def draw(results: Results, file: Path) -> None:
    """Forward and backward of each contender as a bar, beside BF16's; none of over ten times it."""
    first = results.sizes("linear")[0]
    rows = [r for r in results.rows("linear") if r["size"] == first and "refused" not in r]
    rows = [row for row in rows if row.get("times_bf16", {}).get("both", 1) > 0.1]
    names = [row["contender"] for row in rows]
    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for phase, color in (("forward", "#4c72b0"), ("backward", "#dd8452")):
        widths = [row[phase]["median_ms"] for row in rows]
        axes.barh(names, widths, left=left, color=color, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, end in zip(rows, left, strict=True):
        if "times_bf16" in row:
            text = f" {row['times_bf16']['both']:.2f}×"
            axes.annotate(text, (end, row["contender"]), va="center")
    if base := results.row("linear", "BF16"):
        axes.axvline(base["both"]["median_ms"], color="black", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"ms, {first[0]} tokens, {first[1]} → {first[2]}; times as fast as BF16")
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)


def body(results: Results, picture: Path) -> str:
    """Return the text between the markers."""
    sections = []
    for name, title, write in (
        ("linear", "A linear layer", partial(linear, picture=picture.name)),
        ("quantize", "Quantization alone", quantize),
        ("model", "A whole model", model),
    ):
        sections.append(f"## {title}")
        if not results.rows(name):
            sections.append(f"{MISSING.capitalize()}: `python benchmarks/{name}.py`.")
            continue
        sections += [_origin(results.data[name]), write(results)]
    return "\n\n".join(sections)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpu", default="h200", help="GPU in the names of the result files (default: h200)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "performance.md")
    args = parser.parse_args(argv)
    results = Results(args.results, args.gpu)
    picture = args.document.with_suffix(".png")
    if results.rows("linear"):
        draw(results, picture)
    replace_sections(args.document, {"performance": body(results, picture)})


if __name__ == "__main__":
    main()
