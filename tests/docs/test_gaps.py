"""Every loss gap with an error on a page is one that a generator, or this file, computes."""

import json
import re
from collections.abc import Iterator

import leaderboard
import numpy as np
from pages import PAGES, ROOT

GAP = re.compile(r"[+-]?(\d+\.\d+)%\s+±\s+(\d+\.\d+)")
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
GENERATED = [
    DOCS / "results.md",
    *(DOCS / "research" / f"{n}.md" for n in ("leaderboard", "evidence")),
]


def folding_gaps() -> Iterator[tuple[str, str]]:
    """Yield the gaps of folded to other runs, paired by seed, of the last twentieth."""
    runs = json.loads((RESULTS / "studies-folding.json").read_text())
    means: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        losses = run["losses"]
        means.setdefault(run["name"], []).append(np.mean(losses[-len(losses) // 20 :]))
    for name in ("fp8-tile", "mxfp8"):
        ratios = np.array(means[name]) / means[f"{name}, not folded"] - 1
        error = ratios.std(ddof=1) / len(ratios) ** 0.5
        yield f"{100 * abs(ratios.mean()):.2f}", f"{100 * error:.2f}"


def test_gaps_of_pages_are_computed():
    computed = set(folding_gaps())
    earlier = json.loads((RESULTS / "leaderboard-mixed.json").read_text())
    for text in (leaderboard.page(earlier, leaderboard.SPEEDS, []), *map(read, GENERATED)):
        computed |= set(GAP.findall(text))
    # Decimals of claims.md are compared by test_generate_claims.py.
    others = {*PAGES} - {*GENERATED, DOCS / "research" / "claims.md"}
    found = {(page.name, *gap) for page in others
             for gap in GAP.findall(read(page))}  # fmt: skip
    assert len(found) > 25
    assert [gap for gap in found if gap[1:] not in computed] == []


def read(page) -> str:
    return page.read_text(encoding="utf-8")
