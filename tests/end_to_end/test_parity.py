"""Parallel layouts compared with one process within the bounds of a table."""

import json
import math
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import compose, parity
from benchmarks.parity import LAYOUTS, RECIPES, Recipe

FIXED = " ".join(f"--recipe-set {gemm}.hadamard.signs=fixed" for gemm in ("dgrad", "wgrad"))
# One of each kind; experts are in test_experts.py, distributed optimizers in test_resharding.py.
FAST_LAYOUTS = {name: LAYOUTS[name] for name in ("TP2+SP", "PP2-interleaved", "DP2")}
FAST_RECIPES = {"nvfp4-group": RECIPES["nvfp4-group"]}
# The output layer's weight is split, a copy of the embedding's, and taken by predictions, too.
OUTPUT_LAYOUTS = {name: LAYOUTS[name] for name in ("TP2+SP", "PP2-tied", "TP2+SP-mtp")}
OUTPUT_RECIPES = {
    "output": Recipe("--precision-recipe fp8-tile --recipe-set output_layer=fp8-tile")
}
# Compared with each other, on one process.
SIGNS = {
    "mxfp4-backward": RECIPES["mxfp4-backward"],
    "fixed signs": Recipe(f"{RECIPES['mxfp4-backward'].options} {FIXED}"),
}
# Compiling would take longer than one iteration of each run.
FAST = ("--quantization-engine", "reference", "--global-batch-size", "4")


@pytest.fixture(scope="module")
def data(corpus) -> list[str]:
    """Arguments for the tiny data."""
    return ["--data-path", str(corpus / "data"), "--tokenizer-model", str(corpus / "tokenizer")]


@pytest.fixture
def composed(tmp_path):
    """Function that makes runs and returns their record."""

    def compose_runs(layouts: dict, recipes: dict, common: list, iterations: int) -> dict:
        on_gpu = torch.cuda.is_available()
        context = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
        results = compose.Results(tmp_path / "out.json", {"machine": {}})
        gpus = torch.cuda.device_count()
        composer = compose.Composer(context, results, tmp_path, gpus, 300, math.inf)
        composer.compose(parity.runs_of(layouts, recipes, common, iterations), jobs=1)
        return json.loads((tmp_path / "out.json").read_text())

    return compose_runs


def check(record: dict, layouts: dict, recipes: dict) -> None:
    """Check that every cell was compared and is within its bounds."""
    compared = {(cell["layout"], cell["recipe"]) for cell in record["cells"] if "loss" in cell}
    assert compared == {(layout, recipe) for layout in layouts for recipe in recipes}
    assert [text for cell in record["cells"] if (text := parity.complaint(cell))] == []


@pytest.mark.slow
def test_layouts_agree(composed, data):
    """The first step after the checkpoint is compared."""
    record = composed(FAST_LAYOUTS, FAST_RECIPES, [*data, *FAST], iterations=1)
    check(record, FAST_LAYOUTS, FAST_RECIPES)
    assert all([*cell["steps"]] == ["3"] for cell in record["cells"])


@pytest.mark.slow
def test_layouts_agree_with_a_quantized_output_layer(composed, data):
    record = composed(OUTPUT_LAYOUTS, OUTPUT_RECIPES, [*data, *FAST], iterations=1)
    check(record, OUTPUT_LAYOUTS, OUTPUT_RECIPES)


@pytest.mark.slow
def test_other_signs_exceed_the_bounds(composed, data):
    """Only layouts without split layers are compared; tests/layers compares the bits of others."""
    layouts = {"recompute-selective": LAYOUTS["recompute-selective"]}
    record = composed(layouts, SIGNS, [*data, *FAST], iterations=1)
    norms = {entry["key"]: entry["steps"]["3"][1] for entry in record["references"]}
    fresh, fixed = (norms[f"single-dense {name}"] for name in SIGNS)
    assert abs(fresh - fixed) / fixed > 3 * RECIPES["mxfp4-backward"].bounds("whole").norm


@pytest.mark.slow
def test_all_layouts_agree(composed, data):
    check(composed(LAYOUTS, RECIPES, data, iterations=3), LAYOUTS, RECIPES)
