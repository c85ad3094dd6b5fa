"""Whole runs against what H200s took: plan_check's, model-h200.json, and docs/hybrids.md."""

import json
from pathlib import Path

import pytest

from megatron_lowbit.planning.command import plan
from megatron_lowbit.planning.communication import Cluster
from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import given
from megatron_lowbit.recipes import load_recipes
from megatron_lowbit.planning.training_arguments import TrainingArguments

ROOT = Path(__file__).parents[2]
MODEL = json.loads((ROOT / "benchmarks" / "results" / "model-h200.json").read_text())
RECIPES = {
    "bf16": "--precision-recipe bf16",
    "fp8-tile": "--fp8-recipe fp8-tile",
    "fp8-tile, square": "--fp8-recipe fp8-tile --recipe-set wgrad.input.format=fp8-128x128-e4m3",
    "mxfp4-backward": "--fp4-recipe mxfp4-backward",
    "nvfp4": "--fp4-recipe nvfp4 --recipe-set bf16_blocks=none",
}


RUNS = [
    row
    for file in sorted((ROOT / "benchmarks" / "results").glob("plan_check-*.json"))
    for row in json.loads(file.read_text())["rows"]
]
UNEXPLAINED = ("Llama-3-8B's width, 6 layers", "fp8-tile", "TP4")
"""docs/planning.md: it takes longer than its GEMMs, communication and launches."""


def estimated(words, vocabulary: int, gpus: int = 1, **device):
    args = parse_arguments(words)
    settings = {"transformer_engine": False, "scan": "mamba-ssm"} | device
    device = Device(gpu("h200"), **settings)
    cluster = Cluster(device.gpu, 8)
    (found,) = plan(
        [given(args, gpus)],
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
        complete(row["arguments"]), row["vocabulary"], row["gpus"], scan=row.get("scan", "torch")
    )
    assert found.most_memory == pytest.approx(2**30 * max(row["memory_gib"]), rel=0.02)
    if (row["model"], row["recipe"], row["layout"]) != UNEXPLAINED:
        assert found.step == pytest.approx(found.tokens / row["tokens_per_s"], rel=0.20)


@pytest.mark.parametrize("contender", RECIPES)
def test_four_llama_layers_forward_and_backward(contender):
    row = next(row for row in MODEL["rows"] if row["contender"] == contender)
    words = [*MODEL["arguments"], *RECIPES[contender].split()]
    found = estimated(words, 32000, accumulate=False)
    assert found.most_memory == pytest.approx(1e9 * row["peak_gb"], rel=0.02)
    assert found.step == pytest.approx(row["both"]["median_ms"] / 1e3, rel=0.10)


@pytest.mark.parametrize(
    ("scan", "gib", "speed"), [("mamba-ssm-scan", 36, 47_000), ("torch", 69, 25_300)]
)
def test_eleven_blocks_of_the_8b_hybrid_in_training(scan, gib, speed):
    words = complete(
        f"@{ROOT}/examples/hybrid-8b.args --hybrid-override-pattern M-M-M-M*-M- --num-layers 11 "
        "--seq-length 4096 --micro-batch-size 2 --global-batch-size 8 --train-iters 14 "
        "--lr-warmup-iters 4 --lr-wsd-decay-iters 4".split()
    )
    found = estimated(words, 4096, scan=scan)
    assert found.most_memory == pytest.approx(gib * 2**30, rel=0.03)
    assert found.tokens_per_second == pytest.approx(speed, rel=0.10)
