"""Plans against what H200s took: plan_check's training runs, and the layers of model-h200.json.

Runs on other versions of Megatron-LM are not compared: with 0.16.1 the optimizer and the
cross-entropy were others. The linear layers were the present ones, except for SwiGLU's amaxes.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from built import planned

ROOT = Path(__file__).parents[2]
MODEL = json.loads((ROOT / "benchmarks" / "results" / "model-h200.json").read_text())
RECIPES = {
    "bf16": "--precision-recipe bf16",
    # Tiles as they were measured: not folded.
    "fp8-tile": "--fp8-recipe fp8-tile --recipe-set folding=false",
    "fp8-tile, square": "--fp8-recipe fp8-tile --recipe-set folding=false "
    "--recipe-set wgrad.input.format=fp8-128x128-e4m3",
    "mxfp4-backward": "--fp4-recipe mxfp4-backward",
    "nvfp4": "--fp4-recipe nvfp4 --recipe-set bf16_blocks=none",
}
FP4 = json.loads((ROOT / "benchmarks" / "results" / "model-fp4-h200.json").read_text())
FP4_RECIPES = {
    "nvfp4-4over6": "--precision-recipe nvfp4-4over6 --recipe-set bf16_blocks=none",
    **{name: f"--precision-recipe {name}"
       for name in ("nvfp4-ue5m3", "torchao-v2", "quartet2", "averis")},
}  # fmt: skip
APART = "--no-bias-swiglu-fusion"
"""Leaves SwiGLU as it was then: it gave no amaxes."""
ENGINE = version("megatron-core")
RUNS = [
    row
    for file in sorted((ROOT / "benchmarks" / "results").glob("plan_check-*.json"))
    if (data := json.loads(file.read_text()))["machine"]["megatron_core"] == ENGINE
    for row in data["rows"]
]


@pytest.mark.parametrize("row", RUNS, ids=lambda row: f"{row['recipe']}, {row['layout']}")
def test_training_runs_that_plan_check_measured(row, monkeypatch):
    monkeypatch.chdir(ROOT)
    scan = row.get("scan", "torch")
    plan = planned(row["arguments"], row["gpus"], vocabulary=row["vocabulary"], scan=scan)
    assert plan.most_memory == pytest.approx(2**30 * max(row["memory_gib"]), rel=0.02)
    assert plan.step == pytest.approx(plan.tokens / row["tokens_per_s"], rel=0.20)


@pytest.mark.parametrize("contender", RECIPES)
def test_four_llama_layers_forward_and_backward(contender):
    row = next(row for row in MODEL["rows"] if row["contender"] == contender)
    words = [*MODEL["arguments"], *RECIPES[contender].split(), APART]
    plan = planned(words, vocabulary=32000, accumulate=False)
    assert plan.step == pytest.approx(row["both"]["median_ms"] / 1e3, rel=0.10)


@pytest.mark.parametrize("contender", FP4_RECIPES)
def test_fp4_methods_take_longer_than_nvfp4_as_measured(contender):
    """In Transformer Engine's layers, to a fortieth of a step."""
    seconds = {row["contender"]: row["both"]["median_ms"] / 1e3 for row in FP4["rows"]}
    method, nvfp4 = (
        planned([*FP4["arguments"], *recipe.split(), APART], vocabulary=32000).step
        for recipe in (FP4_RECIPES[contender], RECIPES["nvfp4"])
    )
    on_top = seconds[f"{contender} in TE"] - seconds["nvfp4 in TE"]
    assert method - nvfp4 == pytest.approx(on_top, abs=seconds["nvfp4 in TE"] / 40)
