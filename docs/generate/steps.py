"""Whole training steps that flagship.py measured, by kind of GPU, and their ratios."""

import json
import math
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from results_pictures import is_own

# isort: split
from benchmarks import flagship

KINDS = ("h100", "h200")
SEVERAL = ("2xh200", "4xh200")
"""Hosts whose cases take several GPUs at once."""
BF16, OWN_FP8, TENSORWISE = (
    f"Megatron-LM {name}" for name in ("BF16", "FP8 blockwise", "FP8 tensorwise")
)
NATIVE = f"{TENSORWISE}, native fused loss"
"""Megatron-LM's tensorwise FP8 as fast as it is without this project."""
SAME_LOSS, BF16_SAME_LOSS = "× tensorwise, same loss", "× BF16, same loss"
BASES = {
    "× BF16": BF16,
    BF16_SAME_LOSS: BF16,
    "× blockwise": OWN_FP8,
    "× tensorwise, native fused loss": NATIVE,
    SAME_LOSS: TENSORWISE,
}
"""Precisions that rows are compared with, by the headings of the ratios.

They have the losses that their names say; under "same loss" the loss is the row's own. A model has
one column of BF16: that of the same loss, if the default loss was not measured.
"""
STOCK_LOSSES = ("", "native fused loss")
"""Losses of Megatron-LM, as precisions name them after a comma."""
PICTURED, TIMES = "llama-8b", ("× BF16", "× tensorwise, native fused loss")
"""Model whose steps in graphs the pictures show, and the ratios at their bars."""
MXFP8, MXFP8_OUTPUT = "mxfp8, own loss", "mxfp8 with its output layer, own loss"
CHOICES = (BF16, NATIVE, f"{TENSORWISE}, own loss", MXFP8, MXFP8_OUTPUT)
"""Precisions of README's picture."""
NOISE = 0.01
"""Differences of medians below this share are not told from noise."""
ORDER = list(flagship.DECLARED["precisions"])


class Steps(NamedTuple):
    """Rows of a kind of GPU by model, precision and graphs, and the machine that they are from.

    ``times`` is the file of GPU time by kind of kernel, where there is one.
    """

    rows: dict[tuple[str, str, bool], dict]
    times: dict | None
    machine: dict
    models: dict[str, str]
    peak: float

    def of(self, model: str, failed: bool | None = None) -> list[dict]:
        """Return a model's rows, all or only those that did or did not fail, in ORDER.

        Rows in graphs come first.
        """
        place = {precision: i for i, precision in enumerate(ORDER)}
        rows = [row for row in self.rows.values() if row["model"] == model]
        rows.sort(key=lambda row: (not row["graphs"], place.get(row["precision"], len(place))))
        return [row for row in rows if failed in (None, "error" in row)]

    def bases(self, model: str) -> list[str]:
        """Return the headings of BASES that have a ratio for a row of a model."""
        rows = self.of(model, failed=False)
        done = {row["precision"] for row in rows}
        return [
            heading
            for heading, base in BASES.items()
            if (base in done and heading != BF16_SAME_LOSS)
            or (base not in done and any(self.ratio(row, heading) is not None for row in rows))
        ]

    def ratio(self, row: dict, heading: str) -> float | None:
        """Return the speed of a row relative to a precision of BASES."""
        base = BASES[heading]
        if heading.endswith("same loss"):
            _, comma, loss = row["precision"].partition(", ")
            base += comma + loss
        other = self.rows.get((row["model"], base, row["graphs"]), {})
        return row["tokens_per_s"] / other["tokens_per_s"] if "tokens_per_s" in other else None

    def figures(self, model: str) -> list[list[object]]:
        """Return the cells of a model's rows that ended well."""
        return [
            [
                f"{row['precision']}{', graphs' if row['graphs'] else ''}",
                f"{row['median_ms']:.0f} ({row['fastest_ms']:.0f})",
                f"{row['tokens_per_s']:,}",
                f"{row['tflop_per_s']:.0f}",
                f"{row['mfu']:.1%}",
                f"{row['peak_gib']:.1f}",
                *(self.ratio(row, heading) for heading in self.bases(model)),
            ]
            for row in self.of(model, failed=False)
        ]

    def speedups(self, model: str) -> dict[str, float]:
        """Return speeds relative to Megatron-LM BF16 by precision, of the fastest row of each.

        Rows count without graphs only if the base has none. Precisions of Megatron-LM count with
        its losses, or with any if BF16 was measured with none of these.
        """
        rows = [(*row["precision"].partition(", ")[::2], row) for row in self.of(model, False)]
        stock = [row for row in rows if not is_own(row[0]) or row[1] in STOCK_LOSSES]
        rows = stock if any(name == BF16 for name, *_ in stock) else rows
        bases = [row for name, _, row in rows if name == BF16]
        base = max(bases, key=itemgetter("tokens_per_s"), default={"graphs": math.inf})
        speeds: dict[str, float] = {}
        for name, _, row in rows:
            if row["graphs"] >= base["graphs"]:
                speed = row["tokens_per_s"] / base["tokens_per_s"]
                speeds[name] = max(speed, speeds.get(name, 0.0))
        return speeds

    def pictured(self) -> dict[str, dict]:
        """Return the rows of PICTURED in graphs by precision."""
        rows = self.of(PICTURED, failed=False)
        return {row["precision"]: row for row in rows if row["graphs"]}

    def choices(self) -> dict[str, dict]:
        """Return the rows of CHOICES; none if one is missing."""
        rows = self.pictured()
        return {name: rows[name] for name in CHOICES} if rows.keys() >= set(CHOICES) else {}

    def gpu_times(self) -> list[list[object]]:
        """Return each profiled case, its commit and the milliseconds of ``kinds``."""
        return [
            [row["case"], row["commit"][:7], *map(row["milliseconds"].get, self.kinds)]
            for row in self.timed
        ]

    @property
    def kinds(self) -> list[str]:
        """Kinds of kernels of any profiled case."""
        return list(dict.fromkeys(kind for row in self.timed for kind in row["milliseconds"]))

    @property
    def timed(self) -> list[dict]:
        """Rows of the cases that were profiled."""
        return [row for row in self.times["rows"] if "error" not in row] if self.times else []


def card_of(kind: str) -> str:
    """Return the kind of GPU of one of KINDS and SEVERAL."""
    return kind.rpartition("x")[2]


def read_steps(results: Path, kind: str) -> Steps | None:
    """Read the files of a kind of GPU; None where there are none.

    Raises:
        SystemExit: one is of another GPU, or none holds a row that ended well.
    """
    files = sorted(results.glob(f"flagship-{kind}*.json"))
    if not files:
        return None
    rows: dict[tuple[str, str, bool], dict] = {}
    for file in files:
        data = json.loads(file.read_text())
        if card_of(kind).upper() not in data["machine"]["gpu"]:
            raise SystemExit(f"error: {file}: measured on {data['machine']['gpu']}")
        for row in data["rows"]:
            key = row["model"], row["precision"], row["graphs"]
            if "error" not in row or key not in rows:
                rows[key] = row
    if all("error" in row for row in rows.values()):
        raise SystemExit(f"error: {files[0]}: no case ended well")
    file = results / f"gpu-time-{kind}.json"
    times = json.loads(file.read_text()) if file.is_file() else None
    return Steps(rows, times, data["machine"], data["models"], data["peak_tflops"])
