"""Planned memory of the rows of ``benchmarks/stored_weights.py``."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from test_plan import planned

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import stored_weights


def test_rows_by_plan_take_what_the_options_save():
    model = f"{stored_weights.MODELS['llama3.2-1b']} {stored_weights.COMMON} --train-iters 8 "
    model += "--micro-batch-size 2 --global-batch-size 4 "
    # A machine without Transformer Engine refuses its optimizer.
    rows = {name: words for name, words in stored_weights.ROWS.items() if "moments" not in name}
    found = {
        name: planned(model + words, gpus=2, kind="h100").memory[0].total
        for name, words in rows.items()
    }
    share = {name: size / found["bf16"] for name, size in found.items()}
    assert share["fp8-tile, codes, FP8 SwiGLU"] == pytest.approx(0.823, abs=0.001)
    for options in ("", ", codes", ", codes, FP8 SwiGLU"):
        assert share[f"nvfp4{options}"] < share[f"fp8-tile{options}"] < 1
    for recipe in ("fp8-tile", "nvfp4"):
        sizes = [share[name] for name in rows if name.startswith(recipe)]
        assert all(one > other for one, other in pairwise(sizes))
