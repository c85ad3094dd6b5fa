"""Parallel layouts compared with one process within the bounds of a table.

The file is its own worker, for layouts whose processes are forked.
"""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import parity
from benchmarks.parity import LAYOUTS, RECIPES, Recipe, measure, work_off
from tests.short_runs import fork_results_queue

FIXED = " ".join(f"--recipe-set {gemm}.hadamard.signs=fixed" for gemm in ("dgrad", "wgrad"))
# One of each kind; experts are in test_experts.py, distributed optimizers in test_resharding.py.
FAST_LAYOUTS = {name: LAYOUTS[name] for name in ("TP2+SP", "PP2-interleaved", "DP2")}
FAST_RECIPES = {"nvfp4-group": RECIPES["nvfp4-group"]}
# Compared with each other, on one process.
SIGNS = {
    "mxfp4-backward": RECIPES["mxfp4-backward"],
    "fixed signs": Recipe(f"{RECIPES['mxfp4-backward'].options} {FIXED}"),
}


# Compiling would take longer than one iteration of each run.
FAST = ("--quantization-engine", "reference", "--global-batch-size", "4")


def run(layouts: dict, recipes: dict, data: list, folder: Path, iterations: int) -> dict:
    """Return cells by (layout, recipe)."""
    cells = measure(layouts, recipes, data, iterations, folder / "start", folder)
    return {(cell.layout, cell.recipe): cell for cell in cells}


@pytest.fixture(scope="module")
def data(corpus) -> list[str]:
    """Arguments for the tiny data."""
    model = ["--tokenizer-model", str(corpus / "tokenizer"), "--num-workers", "0"]
    return ["--data-path", str(corpus / "data"), "--tokenizer-type", "HuggingFaceTokenizer", *model]


@pytest.fixture
def forked(run_ranks, monkeypatch):
    """Fork all processes, instead of starting them by torchrun."""

    def launch(processes: int, runs: list[dict], work: Path) -> None:
        job = work / f"{processes}.json"
        job.write_text(json.dumps(runs))
        run_ranks(__file__, processes, job, timeout=300)

    monkeypatch.setattr(parity, "_launch", launch)


def check(cells: dict, layouts: dict, recipes: dict) -> None:
    """Check that every cell was compared and is within its bounds."""
    compared = {place for place, cell in cells.items() if cell.difference is not None}
    assert compared == {(layout, recipe) for layout in layouts for recipe in recipes}
    complaints = [cell.complaint(layouts, recipes) for cell in cells.values()]
    assert [complaint for complaint in complaints if complaint] == []


@pytest.mark.slow
def test_layouts_agree(forked, data, tmp_path):
    """The first step after the checkpoint is compared."""
    cells = run(FAST_LAYOUTS, FAST_RECIPES, [*data, *FAST], tmp_path, iterations=1)
    check(cells, FAST_LAYOUTS, FAST_RECIPES)


@pytest.mark.slow
def test_other_signs_exceed_the_bounds(forked, data, tmp_path):
    """Only layouts without split layers are compared; tests/layers compares the bits of others."""
    layouts = {"recompute-selective": LAYOUTS["recompute-selective"]}
    cells = run(layouts, SIGNS, [*data, *FAST], tmp_path, iterations=1)
    fresh, fixed = (cells["single-dense", name] for name in SIGNS)
    bound = RECIPES["mxfp4-backward"].whole.norm
    assert fresh.distance(fixed.losses, fixed.norms).norm > 3 * bound


@pytest.mark.slow
def test_all_layouts_agree(data, tmp_path):
    check(run(LAYOUTS, RECIPES, data, tmp_path, iterations=3), LAYOUTS, RECIPES)


if __name__ == "__main__":
    fork_results_queue()
    work_off(Path(sys.argv[1]))
