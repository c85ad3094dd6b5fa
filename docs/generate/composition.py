"""Write docs/composition.md from what compose.py found.

python docs/generate/composition.py
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown import RESULTS, ROOT, table

sys.path.insert(0, str(ROOT / "benchmarks"))

from compose_features import FEATURES, LAYERS, PAIRS, RECIPES, Run

PAGE = ROOT / "docs" / "composition.md"
COLUMNS = [(layers, recipe) for layers in LAYERS for recipe in RECIPES]
NOT_RUN = "not run"
UPSTREAM = {
    "counter-productive to free a view": "graphs-in-a-pipeline",
    "fused_mla_yarn_rope_apply.py": "graphs-of-latent-attention",
    "Cannot copy between CPU and CUDA tensors during CUDA graph": "graphs-of-experts",
    "unexpected keyword argument 'enable_cache'": "asynchronous-saves-of-megatron-fsdp",
    "KeyError (param_and_grad_buffer.py": "graphs-of-megatron-fsdp",
    "Modules must not have hooks registered": "graphs-of-megatron-fsdp",
}
"""Anchors of docs/upstream-notes.md by a part of the message that a bug ends in."""
UPSTREAM_LOSSES = {(ranks, "FSDP"): "sharded-experts-of-megatron-fsdp" for ranks in ("EP2", "ETP2")}
"""The same by features whose losses are out of bounds by a bug."""

Cells = Mapping[tuple[str, str, tuple[str, ...]], Mapping[str, Any]]

TEXT = """# Every pair of features

    python benchmarks/compose.py --output benchmarks/results/compose.json --jobs 2 --timeout 240
    python benchmarks/compose.py --output benchmarks/results/compose-2xh100.json --jobs 14 \\
        --layers te
    python benchmarks/compose.py --output benchmarks/results/compose-2xh200.json --jobs 11 \\
        --layers local --features FSDP graphs async-save
    python docs/generate/composition.py

trains a tiny model with every pair of features, under kinds of layers and recipes, and writes this
page. {machines}

The first two losses and the first gradient norm are compared with those of one process with the
same model and recipe, from the same weights, cells of H200s with those of an H100. Megatron-FSDP
and quantized parameters are compared with the distributed optimizer on the same ranks. Runs with
`resume` or `async-save` save in the middle; what is resumed from there must be equal to the bit on
a CPU. A CPU computes in FP32, except with quantized parameters; GPUs have BF16 weights.

{summary}

- **equal**: all losses and gradient norms, to the bit.
- **two figures**: parity. Largest relative difference of losses / of the first gradient norm,
  within the bounds below.
- **refused N**: by this project, Megatron-LM or Transformer Engine, with message N below.
- **upstream bug**: Megatron-LM fails without recipes, too; the link has a reproduction.
- **needs a GPU**, **needs 4 GPUs**, **needs mamba-ssm**: not on the machines so far. **not run**:
  by nobody yet.

## Features

{features}

`delayed` puts attention's linear layers under delayed scaling with a history of one step, beside
the column's recipe. `switch` changes from the recipe to `bf16`, and from `bf16` to `fp8-tile`, in
the middle. `VPP` has a layer in each virtual stage
(`--num-layers-per-virtual-pipeline-stage 1`, or `|` in a hybrid's pattern). `EP2` and `ETP2` have
experts.
With `EP2` and without `ETP2`, experts are not split
(`--expert-tensor-parallel-size 1`). `nvfp4` is without blocks in BF16, and with `tensor_scale:
group`. All arguments: `benchmarks/compose_features.py`.

## Bounds

{bounds}

Sums over ranks, microbatches or BF16 partial results are added up in another order. A quantized
recipe amplifies this: a value near a rounding threshold takes the other side, which is a whole
step. Layers that are spread have other scales and random numbers by design. See
[parallelism](parallelism.md#measured). Under `nvfp4`, moving one process's own norm weights by 1e-7
moves the second loss by up to 1.7e-3 and the first gradient norm by up to 2.7e-3 (12 draws, with
MTP and without); partial sums in BF16 move them by up to 1.4e-3 and 1.1e-2 (18 draws), and with
`MTP` or `MLA` by up to 4.8e-3 and 1.9e-2 (48 draws on a CPU; with `MTP` by 1.6e-3 and 1.4e-2 in 8
draws on two H200s). The bound of losses is twice that; cells with up to 5.7e-3 are above all
draws. Smaller errors do not show where layers are split.

## Pairs

A feature beside itself is the feature alone.

{pairs}

## Messages

{messages}
"""


def read(files: Iterable[Path]) -> tuple[Cells, list[Mapping[str, Any]]]:
    """Return all cells, those that ran in the place of others, and the machines."""
    cells: dict[tuple[str, str, tuple[str, ...]], Mapping[str, Any]] = {}
    machines = []
    for file in files:
        document = json.loads(file.read_text())
        machines.append(document["machine"])
        for cell in document["cells"]:
            place = cell["layers"], cell["recipe"], tuple(cell["features"])
            if place not in cells or (_needs(cells[place]) and not _needs(cell)):
                cells[place] = cell
    return cells, machines


def _needs(cell: Mapping[str, Any]) -> bool:
    return cell["outcome"].startswith("needs")


class Messages:
    """Numbered messages of cells, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, message: str) -> int:
        """Return a message's number."""
        return self._numbers.setdefault(_without_paths(message), len(self._numbers) + 1)

    def __str__(self) -> str:
        return "\n".join(f"{number}. {text}" for text, number in self._numbers.items())


def _without_paths(message: str) -> str:
    message = re.sub(r"(--load|recipe) /\S+", r"\1 FILE", message)
    return message.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")


def kind(cell: Mapping[str, Any] | None) -> str:
    """Return a cell's outcome, with bugs of Megatron-LM by that name."""
    if cell is None:
        return NOT_RUN
    if _anchor(cell):
        return "upstream bug"
    return cell["outcome"]


def shown(cell: Mapping[str, Any] | None, messages: Messages) -> str:
    """Return a cell's text in the table."""
    name = kind(cell)
    if cell is None:
        return name
    if name == "upstream bug":
        return f"[{name}](upstream-notes.md#{_anchor(cell)})"
    if name == "parity":
        return " / ".join(_short(cell[part]) for part in ("loss", "norm"))
    if name == "apart":
        figures = (_short(cell[part]) for part in ("loss", "norm", "resumed") if part in cell)
        return f"**apart** {' / '.join(figures)}"
    if name in ("refused", "failed", "no reference"):
        return f"{name if name == 'refused' else f'**{name}**'} {messages.number(cell['message'])}"
    return name


def _anchor(cell: Mapping[str, Any]) -> str | None:
    if cell["outcome"] == "apart":
        return UPSTREAM_LOSSES.get(tuple(cell["features"]))
    if cell["outcome"] not in ("failed", "refused", "no reference", "did not end"):
        return None
    return next((a for part, a in UPSTREAM.items() if part in cell["message"]), None)


def _short(x: float) -> str:
    return "0" if x == 0 else f"{x:.0e}".replace("e-0", "e-")


def summary(cells: Cells) -> str:
    """Count outcomes by column."""
    counts = {column: Counter() for column in COLUMNS}
    for layers, recipe in COLUMNS:
        for pair in PAIRS:
            counts[layers, recipe][kind(cells.get((layers, recipe, _ordered(pair))))] += 1
    names = sorted({name for count in counts.values() for name in count})
    rows = [[f"{layers}, `{recipe}`", *(count[name] for name in names)]
            for (layers, recipe), count in counts.items()]  # fmt: skip
    return table(["layers and recipe", *names], rows)


def bounds() -> str:
    """Tabulate the bounds of parity, each with features that have it."""
    spread = "layers are spread: `EP2`, `ETP2`, `CP2`, a hybrid under `TP2` or `SP`"
    examples = [
        ("no layer is split", ("DP2",)),
        ("layers are split: `TP2`, `SP`", ("TP2",)),
        (spread, ("CP2",)),
        ("layers are split or spread, with `MTP` or `MLA`", ("ETP2", "MLA")),
        ("quantized parameters, BF16 on a CPU", ("quantized-params",)),
    ]
    rows = []
    for what, features in examples:
        row = [what]
        for gpu in (False, True):
            for recipe in RECIPES:
                one = Run(features, "local", recipe, gpu, gpu or "quantized-params" in features)
                row.append(" / ".join(map(_short, one.bounds())))
        rows.append(row)
    headings = [f"{where}, `{recipe}`" for where in ("CPU", "GPU") for recipe in RECIPES]
    return table(["", *headings], rows)


def _ordered(pair: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in FEATURES if name in pair)


def page(cells: Cells, machines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's text."""
    messages = Messages()
    rows = [
        [" × ".join(_ordered(pair)), *(shown(cells.get((*c, _ordered(pair))), messages)
                                       for c in COLUMNS)]
        for pair in PAIRS
    ]  # fmt: skip
    described = (
        f"{x['gpus']} x {x['gpu']}" if x["gpus"] else f"{x['cpu']}, gloo" for x in machines
    )
    features = ((f"`{name}`", _options(name)) for name in FEATURES)
    return TEXT.format(
        machines=f"Machines: {'; '.join(described)}.",
        summary=summary(cells), features=table(["feature", "arguments"], features),
        bounds=bounds(), messages=messages,
        pairs=table(["pair", *(f"{layers} `{recipe}`" for layers, recipe in COLUMNS)], rows),
    )  # fmt: skip


def _options(name: str) -> str:
    feature = FEATURES[name]
    if feature.options:
        return f"`{feature.options}`"
    return {
        "graphs": "`--cuda-graph-impl`: `local` with TE's layers, else `transformer_engine`",
        "resume": "`--save`, `--load`", "delayed": "in the recipe", "switch": "in the recipe",
        "MoE": "`--num-experts 2`", "hybrid": "`--hybrid-layer-pattern M-*-`",
        "MLA": "`--multi-latent-attention`", "MTP": "`--mtp-num-layers 1`",
    }[name]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page from the files of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results", nargs="+", type=Path, default=sorted(RESULTS.glob("compose*.json"))
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    args.page.write_text(page(*read(args.results)), encoding="utf-8")


if __name__ == "__main__":
    main()
