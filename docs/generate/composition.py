"""Write docs/research/composition.md from what compose.py found.

python docs/generate/composition.py
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from render import RESULTS, ROOT, parser, render

# isort: split
from benchmarks.compose_features import FEATURES, LAYERS, PAIRS, RECIPES, Run
from benchmarks.records import short

PAGE = ROOT / "docs" / "research" / "composition.md"
COLUMNS = [(layers, recipe) for layers in LAYERS for recipe in RECIPES]
BOUNDED = [(gpu, recipe) for gpu in (False, True) for recipe in RECIPES]
"""Columns of the table of bounds."""
NOT_RUN = "not run"
TABLES = yaml.safe_load((ROOT / "docs" / "templates" / "composition.yaml").read_text())
UPSTREAM: dict[str, str] = TABLES["upstream"]
UPSTREAM_LOSSES = {tuple(features): anchor for anchor, *features in TABLES["upstream_losses"]}

Cells = Mapping[tuple[str, str, tuple[str, ...]], Mapping[str, Any]]


def read(files: Iterable[Path]) -> tuple[Cells, list[Mapping[str, Any]]]:
    """Return all cells, those that ran in the place of others, and the machines."""
    cells: dict[tuple[str, str, tuple[str, ...]], Mapping[str, Any]] = {}
    machines = []
    for file in files:
        document = json.loads(file.read_text())
        machines.append(document["machine"])
        for cell in document["cells"]:
            key = cell["layers"], cell["recipe"], tuple(cell["features"])
            if key not in cells or (_needs(cells[key]) and not _needs(cell)):
                cells[key] = cell
    return cells, machines


def _needs(cell: Mapping[str, Any]) -> bool:
    return cell["outcome"].startswith("needs")


def _without_names(message: str) -> str:
    message = re.sub(r"(--load|recipe) /\S+", r"\1 FILE", message)
    message = re.sub(rf"recipe (?:{'|'.join(RECIPES)})\b", "recipe NAME", message)
    return re.sub(r"([|<*_])", r"\\\1", message)


def outcome_of(cell: Mapping[str, Any] | None) -> str:
    """Return a cell's outcome, with bugs of Megatron-LM by that name."""
    if cell is None:
        return NOT_RUN
    if _anchor(cell):
        return "upstream bug"
    return cell["outcome"]


def shown(cell: Mapping[str, Any] | None, messages: dict[str, int]) -> str:
    """Return the text of a cell without parity; ``messages`` numbers each message once."""
    name = outcome_of(cell)
    if cell is None:
        return name
    if name == "upstream bug":
        return f"[{name}](upstream-notes.md#{_anchor(cell)})"
    if name == "apart":
        figures = (cell[part] for part in ("loss", "norm", "resumed") if part in cell)
        return f"**apart** {short(*figures)}"
    if name in ("refused", "failed", "no reference"):
        number = messages.setdefault(_without_names(cell["message"]), len(messages) + 1)
        return f"{name if name == 'refused' else f'**{name}**'} {number}"
    return name


def _anchor(cell: Mapping[str, Any]) -> str | None:
    if cell["outcome"] == "apart":
        return UPSTREAM_LOSSES.get(tuple(cell["features"]))
    if cell["outcome"] not in ("failed", "refused", "no reference", "did not end"):
        return None
    return next((a for part, a in UPSTREAM.items() if part in cell["message"]), None)


def bounds() -> list[list[str]]:
    """Return the bounds of parity, each with features that have it."""
    rows = []
    for description, *features in TABLES["bounds"]:
        in_bf16 = "quantized-params" in features
        pair = tuple(features)
        runs = [Run(pair, "local", recipe, gpu, gpu or in_bf16) for gpu, recipe in BOUNDED]
        rows.append([description, *(short(*run.bounds()) for run in runs)])
    return rows


def of_recipes(row: Mapping[str, Mapping[str, Any] | None], messages: dict[str, int]) -> str:
    """Return the text of a pair's cells by recipe: once if all agree, with the largest figures."""
    ran = [cell for cell in row.values() if cell and outcome_of(cell) in ("equal", "parity")]
    largest = [max((cell[part] for cell in ran), default=0) for part in ("loss", "norm")]
    agreed = short(*largest) if any(outcome_of(cell) == "parity" for cell in ran) else "equal"
    recipes: dict[str, list[str]] = {}
    for recipe, cell in row.items():
        recipes.setdefault(agreed if cell in ran else shown(cell, messages), []).append(recipe)
    if len(recipes) == 1:
        return next(iter(recipes))
    return "; ".join(f"`{'`, `'.join(names)}`: {text}" for text, names in recipes.items())


def page(cells: Cells, machines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's text."""
    outcomes = [
        Counter(outcome_of(cells.get((*column, pair))) for pair in PAIRS) for column in COLUMNS
    ]
    names = sorted(set().union(*outcomes))
    messages: dict[str, int] = {}
    rows = []
    for pair in PAIRS:
        texts = [
            of_recipes({recipe: cells.get((kind, recipe, pair)) for recipe in RECIPES}, messages)
            for kind in LAYERS
        ]
        # One cell for an outcome of all layers: what differs stands out.
        rows.append([" × ".join(pair), texts[0], "" if len(set(texts)) == 1 else texts[1]])
    return render(
        "composition", pairs=rows, messages=messages, bounds=bounds(), outcomes=names,
        machines=dict.fromkeys(
            f"{x['gpus']} x {x['gpu']}" if x["gpus"] else f"{x['cpu']}, gloo" for x in machines
        ),
        counts=[[f"{layers}, `{recipe}`", *(count[name] for name in names)]
                for (layers, recipe), count in zip(COLUMNS, outcomes, strict=True)],
        features=[(f"`{name}`", feature.shown or f"`{feature.options}`")
                  for name, feature in FEATURES.items()],
        bound_columns=[f"{'GPU' if gpu else 'CPU'}, `{recipe}`" for gpu, recipe in BOUNDED],
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page from the files of results."""
    made = parser(__doc__, page=PAGE)
    made.add_argument(
        "--results", nargs="+", type=Path, default=sorted(RESULTS.glob("compose*.json"))
    )
    args = made.parse_args(argv)
    args.page.write_text(page(*read(args.results)), encoding="utf-8")


if __name__ == "__main__":
    main()
