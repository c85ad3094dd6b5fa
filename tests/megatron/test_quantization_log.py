"""--log-quantization-error-interval: every layer's figures, and the same training as without.

As a script this file is one rank of a job: it makes the runs of :func:`make_runs`.
"""

import math
import sys
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.features.logs import QuantizationLog, largest_feature
from megatron_lowbit.megatron.pretrain import main
from tests.marks import others_slow
from tests.megatron.tiny_models import TINY
from tests.short_runs import metrics, steps

ARGUMENTS = f"""
    {TINY} --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu
    --untie-embeddings-and-output-weights --seq-length 32 --max-position-embeddings 32
    --vocab-size 500 --train-iters 3 --eval-iters 1
    --eval-interval 2 --precision-recipe nvfp4 --recipe-set bf16_blocks=none
""".split()
MODELS = {
    "dense": "--num-layers 4 --position-embedding-type rope",
    "experts": "--num-layers 2 --position-embedding-type rope --num-experts 4",
    "latent attention": "--num-layers 2 --position-embedding-type rope --multi-latent-attention "
    "--q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 32",
    "hybrid": "--hybrid-layer-pattern M-*M --position-embedding-type none --mamba-state-dim 16 "
    "--mamba-head-dim 8 --mamba-num-groups 4",
}
LAYERS = {
    "dense": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"] * 4,
    "experts": ["linear_qkv", "linear_proj", *["linear_fc1", "linear_fc2"] * 4] * 2,
    "latent attention": [
        "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
        "linear_proj", "linear_fc1", "linear_fc2",
    ] * 2,
    "hybrid": [
        "in_proj", "out_proj", "linear_fc1", "linear_fc2", "linear_qkv", "linear_proj",
        "in_proj", "out_proj",
    ],
}  # fmt: skip


# Two microbatches of each rank, or of each stage, are for layouts of two ranks.
ONE_MICROBATCH = ("--global-batch-size", "2")


def train(model: str, folder: Path, *more: object) -> None:
    main([*ARGUMENTS, *MODELS[model].split(), "--save", str(folder), *map(str, more)])


def make_runs(folder: Path, model: str, *more: str) -> None:
    train(model, folder / "off", *more)
    train(model, folder / "on", *more, "--log-quantization-error-interval", 2)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Function that makes a model's run with a log once; returns the folder of ``on``, its own."""

    @cache
    def run(model: str, *more: str) -> Path:
        folder = tmp_path_factory.mktemp("runs")
        board = ("--tensorboard-dir", folder / "board", "--log-quantization-error-interval", 2)
        train(model, folder / "on", *ONE_MICROBATCH, *board, *more)
        return folder

    return run


def logged(folder: Path, metric: str = "quantization") -> dict[int, dict[str, float]]:
    """Return a metric's figures by iteration, without its name."""
    figures = {
        line["iteration"]: {
            name.removeprefix(f"{metric}/"): value
            for name, value in line.items()
            if name.startswith(f"{metric}/")
        }
        for line in metrics(folder)
    }
    return {iteration: named for iteration, named in figures.items() if named}


def check(folder: Path, model: str) -> None:
    assert len(steps(folder / "on")) == 3
    assert steps(folder / "on") == steps(folder / "off")
    assert logged(folder / "off") == {}
    found = logged(folder / "on")
    assert found.keys() == {1, 3}
    layers = {name.split("/")[0] for name in found[3]}
    assert sorted(layer.rpartition(".")[2] for layer in layers) == sorted(LAYERS[model])
    for layer in layers:
        for operand in ("fprop/input", "fprop/weight", "dgrad/grad", "wgrad/grad", "wgrad/input"):
            assert 10 < found[3][f"{layer}/{operand}/sqnr_db"] < 30
        for gemm in ("fprop", "dgrad", "wgrad"):
            assert 0.03 < found[3][f"{layer}/{gemm}/error"] < 0.5
        assert math.isfinite(found[3][f"{layer}/wgrad/grad/amax"])


@pytest.mark.parametrize("model", others_slow(MODELS, ("dense",)))
def test_every_layer_and_the_same_training(folder_of, model):
    folder = folder_of(model)
    train(model, folder / "off", *ONE_MICROBATCH)
    check(folder, model)


NORMS = {
    "dense": (["input_layernorm", "pre_mlp_layernorm"] * 4, ()),
    "hybrid": (["norm", "pre_mlp_layernorm", "input_layernorm", "norm"], ()),
    "mxnorm": (["self_attention.linear_qkv", "mlp.linear_fc1"] * 4, ("--mxnorm",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_norms_begin_with_outputs_of_rms_1(folder_of, name):
    """Gains begin as 1; eps lowers the first norm's RMS by 1%; MXNorm estimates from 4 blocks."""
    parts, more = NORMS[name]
    model = "dense" if name == "mxnorm" else name
    folder = folder_of(model, *more)
    first = logged(folder / "on", "norms")[1]
    named = {tuple(key.split("/")): value for key, value in first.items()}
    found = {path: v for (path, figure), v in named.items() if figure == "rms"}
    assert len(found) == len(parts) + 1  # and the final one
    outliers = {path: v for (path, figure), v in named.items() if figure == "outlier"}
    assert outliers.keys() == found.keys()
    assert all(1 < ratio < 64**0.5 for ratio in outliers.values())
    for part in parts:
        assert any(path.endswith(part) for path in found)
    for path, rms in found.items():
        assert rms == pytest.approx(1, abs=0.1 if path.endswith(("qkv", "fc1")) else 0.02)
    events = EventAccumulator(str(folder / "board"), {"histograms": 0})
    events.Reload()
    tags = events.Tags()["histograms"]
    assert {tag.split("/")[1] for tag in tags} == set(found)
    for tag in tags:
        steps_of_tag = [event.step for event in events.Histograms(tag)]
        assert steps_of_tag == [1, 3]
    output = events.Histograms(next(tag for tag in tags if tag.endswith("output")))[0]
    values = output.histogram_value
    assert values.sum_squares / values.num == pytest.approx(1, abs=0.2)
    # The feature's share of the input's squares, by both histograms of one norm.
    path = next(iter(found))
    kinds = ("input", "outlier")
    whole, feature = (events.Histograms(f"norms/{path}/{kind}")[0].histogram_value
                      for kind in kinds)  # fmt: skip
    assert whole.num == 64 * feature.num
    ratio = (64 * feature.sum_squares / whole.sum_squares) ** 0.5
    assert ratio == pytest.approx(outliers[path], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "are_grouped"),
    [
        ({"moe_grouped_gemm": True}, True),
        ({"hybrid_layer_pattern": "ME"}, True),
        ({}, False),
        ({"moe_grouped_gemm": True, "transformer_impl": "local"}, False),
        ({"hybrid_layer_pattern": "M-", "num_experts": None}, False),
    ],
    ids=str,
)
def test_layers_that_are_not_measured_are_named(changes, are_grouped):
    args = {"num_experts": 4, "moe_grouped_gemm": False, "hybrid_layer_pattern": None,
            "transformer_impl": "transformer_engine"}  # fmt: skip
    lines = list(QuantizationLog(Namespace(args=Namespace(**args | changes))).describe())
    assert len(lines) == are_grouped
    start = "--log-quantization-error-interval: experts that Transformer Engine groups"
    assert all(line.startswith(start) for line in lines)


def test_the_feature_that_is_largest_over_tokens():
    """The features' mean squares are 4, 36 and 9, of which the mean is 49 / 3."""
    x = torch.tensor([[2.0, 6.0, -3.0], [-2.0, -6.0, 3.0]]).view(2, 1, 3)
    ratio, feature = largest_feature(x)
    assert ratio.item() == pytest.approx((36 / (49 / 3)) ** 0.5) and feature == 1
    # A single large value is no feature of all tokens.
    x[0, 0, 2] = 7.0
    assert largest_feature(x)[1] == 1
    assert largest_feature(torch.zeros(2, 3))[0] == 0
    one = torch.zeros(4, 9)
    one[:, 5] = 1.0
    assert largest_feature(one) == (3.0, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("dense", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
        ("experts", "--expert-model-parallel-size 2"),
    ],
)
def test_two_ranks(run_ranks, tmp_path, model, layout):
    run_ranks(__file__, 2, tmp_path, model, *layout.split(), timeout=300)
    check(tmp_path, model)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--log-quantization-error-interval=-1",), "must be an integer from 0"),
        (("--log-quantization-error-interval", "2"), "needs --save, --tensorboard-dir or --wandb"),
    ],
)
def test_what_does_not_fit(arguments, named):
    with pytest.raises(UserError, match=named):
        main([*ARGUMENTS, *MODELS["dense"].split(), *arguments])


if __name__ == "__main__":
    folder, *rest, _rank = sys.argv[1:]
    make_runs(Path(folder), *rest)
