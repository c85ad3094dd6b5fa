"""The page of pairs of features: complete, from the kept results, and nothing unexplained."""

import json

import composition
import pytest

from benchmarks.compose_features import FEATURES, PAIRS, RECIPES

MACHINE = {"gpus": 0, "gpu": "none", "cpu": "CPU"}
ENDED = {"loss": 1e-4, "norm": 0.0, "message": ""}


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each pair, for local and other layers; a row with one has it for both."""
    lines = text[text.index("## Pairs") : text.index("## Messages")].splitlines()
    split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return {name: [local, others or local] for name, local, others in split[2:]}


@pytest.fixture
def written(tmp_path):
    """Function that writes the page from files of cells: (layers, recipe, features, outcome)."""

    def write(*files: list[tuple]) -> dict[str, list[str]]:
        paths = []
        for number, cells in enumerate(files):
            entries = [
                {**ENDED, "layers": layers, "recipe": recipe, "features": features.split(),
                 "outcome": outcome, "message": message}
                for layers, recipe, features, outcome, message in cells
            ]  # fmt: skip
            paths.append(tmp_path / f"{number}.json")
            paths[-1].write_text(json.dumps({"machine": MACHINE, "cells": entries}))
        page = tmp_path / "page.md"
        composition.main(["--page", str(page), "--results", *map(str, paths)])
        return rows(page.read_text())

    return write


def test_the_page_is_of_the_kept_results(tmp_path):
    composition.main(["--page", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == composition.PAGE.read_text()


def test_no_cell_is_empty_or_unexplained():
    found = rows(composition.PAGE.read_text())
    assert len(found) == len(PAIRS) == len(FEATURES) * (len(FEATURES) + 1) // 2
    cells = [cell for row in found.values() for cell in row]
    assert all(cells)
    assert [cell for cell in cells if "**" in cell or cell == "did not end"] == []


def test_cells(written):
    found = written([
        ("local", "bf16", "TP2", "equal", ""),
        ("local", "nvfp4", "TP2", "parity", ""),
        ("te", "bf16", "TP2", "refused", "no _"),
        ("te", "fp8-tile", "TP2", "refused", "no _"),
        ("te", "nvfp4", "TP2", "failed", "lost"),
        *(("local", recipe, "TP2 PP2", "equal", "") for recipe in RECIPES),
        *(("te", recipe, "TP2 PP2", "apart", "") for recipe in RECIPES),
    ])  # fmt: skip
    assert found["TP2"] == [
        "`bf16`, `nvfp4`: 1e-4 / 0; `fp8-tile`: not run",
        "`bf16`, `fp8-tile`: refused 1; `nvfp4`: **failed** 2",
    ]
    assert found["TP2 × PP2"] == ["equal", "**apart** 1e-4 / 0"]


def test_figures_are_the_largest_of_the_recipes():
    cells = {"bf16": ("equal", 0.0, 0.0), "fp8-tile": ("parity", 2e-4, 1e-6),
             "nvfp4": ("parity", 1e-4, 3e-5)}  # fmt: skip
    row = {recipe: {**ENDED, "features": [], "outcome": outcome, "loss": loss, "norm": norm}
           for recipe, (outcome, loss, norm) in cells.items()}  # fmt: skip
    assert composition.of_recipes(row, {}) == "2e-4 / 3e-5"


def test_a_cell_that_ran_is_shown(written):
    impossible = [("local", "bf16", "FSDP", "needs a GPU", "")]
    ran = [("local", "bf16", "FSDP", "equal", "")]
    assert written(impossible, ran) == written(ran, impossible)
    assert written(impossible, ran)["FSDP"][0].startswith("`bf16`: equal;")
    assert written(impossible)["FSDP"][0].startswith("`bf16`: needs a GPU;")


def test_losses_out_of_bounds_by_a_bug_are_linked(written):
    found = written([
        ("te", "bf16", "TP2 FSDP", "apart", ""), ("te", "bf16", "EP2 FSDP", "apart", ""),
    ])  # fmt: skip
    assert found["TP2 × FSDP"][1].startswith("`bf16`: **apart**")
    bug = "`bf16`: [upstream bug](upstream-notes.md#sharded-experts-"
    assert found["EP2 × FSDP"][1].startswith(bug)


def test_bugs_of_megatron_lm_are_linked(written, monkeypatch):
    monkeypatch.setattr(composition, "UPSTREAM", {"lost": "a-bug"})
    found = written([("local", "bf16", "VPP", "failed", "it is lost")])
    assert found["VPP"][0].startswith("`bf16`: [upstream bug](upstream-notes.md#a-bug);")
