"""Plans against what H200s took: plan_check's training runs, and the layers of model-h200.json.

Runs on other versions of Megatron-LM are not compared: 0.1.0's own engine, on 0.16.1, had another
optimizer and another cross-entropy. Its linear layers are those of today.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from megatron_lowbit.planning.communication import Cluster
from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import candidate_of
from megatron_lowbit.planning.search import plan
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import load_recipes

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
ENGINE = version("megatron-core")
RUNS = [
    row
    for file in sorted((ROOT / "benchmarks" / "results").glob("plan_check-*.json"))
    if (data := json.loads(file.read_text()))["machine"]["megatron_core"] == ENGINE
    for row in data["rows"]
]


def estimated(words, vocabulary: int, gpus: int = 1, **device):
    args = TrainingArguments(words).parse(gpus)
    settings = {"transformer_engine": True, "scan": "mamba-ssm"} | device
    device = Device(gpu("h200"), **settings)
    cluster = Cluster(device.gpu, 8)
    (found,) = plan(
        [candidate_of(args, gpus)],
        load_recipes(args.precision_recipe, args.recipe_set),
        vocabulary,
        device,
        cluster,
    )
    return found


@pytest.mark.parametrize("row", RUNS, ids=lambda row: f"{row['recipe']}, {row['layout']}")
def test_training_runs_that_plan_check_measured(row, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = estimated(
        row["arguments"], row["vocabulary"], row["gpus"], scan=row.get("scan", "torch")
    )
    assert found.most_memory == pytest.approx(2**30 * max(row["memory_gib"]), rel=0.02)
    assert found.step == pytest.approx(found.tokens / row["tokens_per_s"], rel=0.20)


@pytest.mark.parametrize("contender", RECIPES)
def test_four_llama_layers_forward_and_backward(contender):
    row = next(row for row in MODEL["rows"] if row["contender"] == contender)
    words = [*MODEL["arguments"], *RECIPES[contender].split()]
    found = estimated(words, 32000, accumulate=False)
    assert found.step == pytest.approx(row["both"]["median_ms"] / 1e3, rel=0.10)


@pytest.mark.parametrize("contender", FP4_RECIPES)
def test_what_fp4_methods_take_on_top_of_nvfp4(contender):
    """In Transformer Engine's layers, to a fortieth of a step."""
    seconds = {row["contender"]: row["both"]["median_ms"] / 1e3 for row in FP4["rows"]}
    planned, nvfp4 = (
        estimated([*FP4["arguments"], *recipe.split()], 32000).step
        for recipe in (FP4_RECIPES[contender], RECIPES["nvfp4"])
    )
    on_top = seconds[f"{contender} in TE"] - seconds["nvfp4 in TE"]
    assert planned - nvfp4 == pytest.approx(on_top, abs=seconds["nvfp4 in TE"] / 40)
