"""Layouts against one process, from one checkpoint: the same steps, to the bounds of the table."""

from pathlib import Path

import pytest
from tiny_run import arguments_for

from benchmarks.parity import LAYOUTS, RECIPES, Recipe, measure

FIXED = " ".join(f"--recipe-set {gemm}.hadamard.signs=fixed" for gemm in ("dgrad", "wgrad"))
# Pipelines are in test_resharding.py.
FAST_LAYOUTS = {name: LAYOUTS[name] for name in ("TP2+SP",)}
FAST_RECIPES = {name: RECIPES[name] for name in ("nvfp4-group", "mxfp4-backward")} | {
    "fixed signs": Recipe(f"{RECIPES['mxfp4-backward'].options} {FIXED}")
}


# Compiling would take longer than one iteration of each run.
FAST = ("--quantization-engine", "reference", "--global-batch-size", "4")


def run(layouts: dict, recipes: dict, data: list, folder: Path, iterations: int) -> dict:
    """(layout, recipe) to its cell."""
    cells = measure(layouts, recipes, data, iterations, folder / "start", folder)
    return {(cell.layout, cell.recipe): cell for cell in cells}


@pytest.fixture(scope="module")
def data(corpus) -> list[str]:
    """Arguments of the tiny data."""
    arguments = arguments_for(corpus, ())
    return arguments[arguments.index("--data-path") :]


def check(cells: dict, layouts: dict, recipes: dict) -> None:
    """No cell exceeds its bounds, and none was left uncompared."""
    compared = {place for place, cell in cells.items() if cell.difference is not None}
    assert compared == {(layout, recipe) for layout in layouts for recipe in recipes}
    complaints = [cell.complaint(layouts, recipes) for cell in cells.values()]
    assert not any(complaints), complaints


@pytest.fixture(scope="module")
def cells(data, tmp_path_factory) -> dict:
    """The first step after the checkpoint, in some layouts under some recipes."""
    folder = tmp_path_factory.mktemp("parity")
    return run(FAST_LAYOUTS, FAST_RECIPES, [*data, *FAST], folder, iterations=1)


def test_layouts_agree(cells):
    check(cells, FAST_LAYOUTS, FAST_RECIPES)


def test_other_signs_exceed_the_bounds(cells):
    """Where no layer is split; where one is, tests/layers compares the quantized bits."""
    fresh, fixed = (cells["single-dense", name] for name in ("mxfp4-backward", "fixed signs"))
    bound = RECIPES["mxfp4-backward"].whole.norm
    assert fresh.distance(fixed.losses, fixed.norms).norm > 3 * bound


@pytest.mark.slow
def test_all_layouts_agree(data, tmp_path):
    check(run(LAYOUTS, RECIPES, data, tmp_path, iterations=3), LAYOUTS, RECIPES)
