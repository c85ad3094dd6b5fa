"""Write what linear.py, quantize.py and model.py measured on a GPU into docs/performance.md.

    python docs/generate/performance.py

Reads benchmarks/results/{linear,quantize,model}-GPU.json, as many of them as there are, and
replaces what stands between the page's markers: a table for each benchmark, and a picture of the
linear layer's times.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure
from render import RESULTS, ROOT, parser, render, replace_sections


def read(file: Path) -> dict | None:
    """Return a benchmark's file, with its rows by size; None where there is none or it is empty."""
    data = json.loads(file.read_text()) if file.is_file() else {"rows": ()}
    if not data["rows"]:
        return None
    sizes = groupby(data["rows"], lambda row: row.get("size"))
    return data | {"by_size": [(size, list(rows)) for size, rows in sizes]}


def names_and_sizes(linear: dict | None) -> tuple[list[str], list[list]]:
    """Return all contenders, and by size how many times as fast as BF16 each of them is."""
    sizes = [] if linear is None else linear["by_size"]
    names = list(dict.fromkeys(row["contender"] for _, rows in sizes for row in rows))
    lines = []
    for (tokens, inputs, outputs), rows in sizes:
        known = {row["contender"]: row.get("times_bf16", {}).get("both") for row in rows}
        lines.append([f"{tokens} × {inputs} → {outputs}", *map(known.get, names)])
    return names, lines


def draw(linear: dict, file: Path) -> None:
    """Draw forward and backward of each contender as a bar, except beyond ten times BF16's."""
    (tokens, inputs, outputs), rows = linear["by_size"][0]
    rows = [row for row in rows if "refused" not in row]
    rows = [row for row in rows if row.get("times_bf16", {}).get("both", 1) > 0.1]
    names = [row["contender"] for row in rows]
    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
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
        if row["contender"] == "BF16":
            axes.axvline(row["both"]["median_ms"], color="black", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"ms, {tokens} tokens, {inputs} → {outputs}; times as fast as BF16")
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and the picture."""
    made = parser(__doc__, results=RESULTS, document=ROOT / "docs" / "performance.md")
    made.add_argument(
        "--gpu", default="h200", help="GPU in the names of the result files (default: h200)"
    )
    args = made.parse_args(argv)
    benchmarks = ("linear", "quantize", "model")
    files = {name: read(args.results / f"{name}-{args.gpu}.json") for name in benchmarks}
    picture = args.document.with_suffix(".png")
    if files["linear"] is not None:
        draw(files["linear"], picture)
    names, sizes = names_and_sizes(files["linear"])
    text = render("performance", picture=picture.name, names=names, sizes=sizes, **files)
    replace_sections(args.document, {"performance": text.strip()})


if __name__ == "__main__":
    main()
