"""The page of claims: counts, tests that exist, and figures that the linked files have."""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import claims
import numpy as np
import pytest
from evidence import STUDIES_FILE
from pages import ROOT
from render import RESULTS

_, CLAIMS = claims.read()
ROWS = {f"{name}, {claim.place}: {claim.text}": claim
        for name, rows in CLAIMS.items() for claim in rows}  # fmt: skip
NUMBER = re.compile(r"\d+\.\d+(?![\dB])")
"""A decimal number that is no model's size."""
GAP = re.compile(r"[+-]\d+\.\d+% ± \d+\.\d+")


def test_the_page_is_of_the_file(tmp_path):
    claims.main(["--page", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == claims.PAGE.read_text()


def test_claims_differ():
    assert len(ROWS) == sum(map(len, CLAIMS.values()))


def test_counts_add_up():
    text = claims.PAGE.read_text()
    table = re.findall(r"^\| ([^|]+) \|((?: \d+ \|)+)$", text, re.MULTILINE)
    counts = {name: [int(x) for x in re.findall(r"\d+", cells)] for name, cells in table}
    assert counts.keys() == {*CLAIMS, "all"}
    assert all(total == sum(states) for total, *states in counts.values())
    all_of = counts.pop("all")
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == all_of
    listed = Counter(re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE))
    assert [listed[state] for state in claims.STATES] == all_of[1:]


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("claim", ROWS.values(), ids=ROWS)
def test_evidence(claim):
    """Every claim has a file, what is not shown in full a reason, a disagreement a figure.

    What needs hardware names it: a GPU, or a number of parameters or tokens.
    """
    assert claim.state in claims.STATES and claim.files
    assert claim.note or claim.state == "shown"
    assert claim.state not in ("contradicted", "not shown") or re.search(r"\d", claim.note)
    if claim.state == "needs hardware":
        assert re.match(r"Blackwell|Trainium|FP4 GEMMs|[\d.]+[MBT]\b|\d+ H100s|36 runs", claim.note)
    for file in claim.files:
        path, _, test = file.partition("::")
        assert (ROOT / path.partition("#")[0]).is_file(), path
        assert not test or test in functions_of(path), file


@pytest.mark.parametrize("claim", ROWS.values(), ids=ROWS)
def test_figures(claim):
    """Decimal numbers are in a linked file; a gap has its error there."""
    paths = [ROOT / re.split("#|::", file)[0] for file in claim.files]
    texts = [COMPUTED[path.name]() if path.name in COMPUTED else path.read_text("utf-8")
             for path in paths]  # fmt: skip
    for pattern in (NUMBER, GAP):
        assert set(pattern.findall(claim.note)) <= set(pattern.findall(" ".join(texts)))


def test_figures_of_disagreements():
    _, _, text = claims.PAGE.read_text().partition("## Largest disagreements\n")
    text, *_ = text.partition("\n## ")
    assert len(re.findall(r"^\d\. ", text, re.MULTILINE)) == 3
    rows = " ".join(f"{claim.text} {claim.note}" for claim in ROWS.values())
    for pattern in (NUMBER, GAP):
        assert set(pattern.findall(text)) <= set(pattern.findall(rows))


# -- figures that are computed from results -------------------------------------------------------


def speedups(
    rows: Sequence[dict],
    keys: Sequence[str],
    time: str,
    base: Callable[[str], Any],
    other: Callable[[str], Any],
) -> list[float]:
    """Return the ratio of two contenders' shortest times for each combination of keys."""
    found = []

    def key(row: dict) -> tuple:
        return tuple(row.get(name, 0) for name in keys)

    for _, group in groupby(sorted(rows, key=key), key):
        times = [(row["contender"], row[time]) for row in group]
        slow, fast = ([t for name, t in times if which(name)] for which in (base, other))
        if slow and fast:
            found.append(min(slow) / min(fast))
    return found


def figures_of_ceilings() -> str:
    """Return copies in TB/s, FP8 GEMMs relative to BF16, and overheads of a backward pass in %."""
    result = json.loads((RESULTS / "mxfp4_overhead-h200.json").read_text())
    ceilings, found = result["ceilings"], [row.get("overhead") for row in result["rows"]]
    bf16, *fp8 = (
        ceilings["gemm_tflop_per_s"][name]
        for name in ("bf16", "fp8 1x128 . 128x128", "fp8 per tensor")
    )
    numbers = [ceilings["copy_tb_per_s"], *(rate / bf16 for rate in fp8)]
    shares = [100 * share for row in found if row for share in row.values()]
    return " ".join([*(f"{x:.2f}" for x in numbers), *(f"{x:.1f}" for x in shares)])


def figures_of_mxnorm() -> str:
    rows = json.loads((RESULTS / "mxnorm-h200.json").read_text())["rows"]

    def of(part: str, case: str = "", compiled: str = "") -> list[float]:
        chosen = [row for row in rows if row["part"] == part and case in row["case"]]
        names = (f"{norm}{compiled}" for norm in ("RMSNorm", "MXNorm"))
        sizes = ("case", "tokens", "hidden", "batch")
        return speedups(chosen, sizes, "median_ms", *(name.__eq__ for name in names))

    means = [math.exp(np.log(of(*case)).mean()) for case in (
        ("kernel", "E4M3, B = 32"), ("kernel", "E4M3, B = 64"), ("kernel", "NVFP4"),
        ("kernel", "E4M3, B = 32", ", compiled"), ("kernel", "E2M1, B = 16", ", compiled"),
    )]  # fmt: skip
    layers = [100 * math.exp(np.log(of("layer", case)).mean()) - 100 for case in ("mxfp8", "nvfp4")]
    ends = min(of("kernel")), max(of("kernel"))
    return " ".join([*(f"{x:.2f}" for x in (*means, *ends)), *(f"{x:.1f}" for x in layers)])


def figures_of_all_reduce(ranks: int) -> str:
    rows = json.loads((RESULTS / f"all_reduce_norm-{ranks}xh200.json").read_text())["rows"]
    found = speedups(
        rows, ("rows", "hidden"), "us",
        lambda name: "kernel" in name, lambda name: name == "fused",
    )  # fmt: skip
    of_a_row = [str(row["us"]) for row in rows if (row["rows"], row["hidden"]) == (1, 4096)]
    return " ".join([f"{min(found):.2f}", f"{max(found):.2f}", *of_a_row])


def test_the_page_of_the_fused_all_reduce_has_the_claim_s_figures():
    least, most = figures_of_all_reduce(2).split()[:2]
    page = (ROOT / "docs" / "research" / "fused-allreduce.md").read_text()
    assert f"is {least} to {most} times as fast as an all-reduce by NCCL" in page


def figures_of_a_start() -> str:
    """Return the gap of SR to RHT with SR from 2% to 10% of the run."""
    runs = json.loads(STUDIES_FILE.read_text())["mxfp4-backward"]
    losses = {(run["name"], run["seed"]): np.array(run["losses"]) for run in runs}
    gaps = []
    for seed in range(1, 5):
        alone, both = losses["SR", seed], losses["RHT + SR, g = 64", seed]
        start = slice(len(both) // 50, len(both) // 10)
        gaps.append(100 * (alone[start].mean() / both[start].mean() - 1))
    return f"{np.mean(gaps):+.2f}% ± {np.std(gaps, ddof=1) / 2:.2f}"


COMPUTED = {
    "mxfp4_overhead-h200.json": figures_of_ceilings,
    "mxnorm-h200.json": figures_of_mxnorm,
    "all_reduce_norm-2xh200.json": lambda: figures_of_all_reduce(2),
    "all_reduce_norm-4xh200.json": lambda: figures_of_all_reduce(4),
    "studies-h200.json": figures_of_a_start,
}
