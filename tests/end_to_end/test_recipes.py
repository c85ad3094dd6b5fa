"""Training with every shipped recipe: loss, arithmetic, and the printed table."""

import math
from pathlib import Path

import pytest
from tiny_run import ONE_MICROBATCH, ROOT, done, steps

from tests.marks import others_slow

ROLES = ("input", "weight", "grad")
# Arguments, how many of the 16 linear layers they quantize, and what the table says of that.
ROWS = {
    "bf16": ("--precision-recipe bf16", 0, "bf16"),
    "fp8-tile": ("--fp8-recipe fp8-tile", 16, "fp8-1x128-e5m2"),
    "fp8-tile-grad-e4m3": (
        "--fp8-recipe fp8-tile --recipe-set grad.format=fp8-1x128-e4m3", 16, "fp8-1x128-e4m3",
    ),
    "fp8-tile-of-32": (
        "--fp8-recipe fp8-tile" + "".join(
            # With scales that are powers of two, blocks of 128 have nearly the same values.
            f" --recipe-set {role}.block=32 --recipe-set {role}.scale_format=fp32" for role in ROLES
        ), 16, "fp8-1x128-e5m2 block 32 x fp8-128x128-e4m3 block 32: ",
    ),
    "fp8-tile-e4m3": ("--fp8-recipe fp8-tile-e4m3", 4, "fp8-1x128-e4m3"),
    "fp8-tensorwise": ("--fp8-recipe fp8-tensorwise", 16, "fp8-tensor-e4m3"),
    "fp8-row": ("--fp8-recipe fp8-row", 16, "fp8-row-e4m3 x fp8-row-e4m3"),
    "fp8-delayed": (
        "--fp8-recipe fp8-delayed --recipe-set amax_history.just_in_time=4", 16, "delayed",
    ),
    "mxfp8": ("--fp8-recipe mxfp8", 16, "mxfp8-e4m3"),
    "mxfp4-backward": ("--fp4-recipe mxfp4-backward", 16, "RHT-64"),
    "fp8-tile+mxfp4-backward": (
        "--fp8-recipe fp8-tile --fp4-recipe mxfp4-backward", 16, "fp8-128x128-e4m3",
    ),
    "mxfp4": ("--fp4-recipe mxfp4", 8, "RHT-32"),
    "nvfp4": ("--fp4-recipe nvfp4", 8, "RHT-16"),
    "nvfp4-rows": (
        "--fp4-recipe nvfp4 --recipe-set input.row_scaled=true --recipe-set grad.row_scaled=true",
        8, "nvfp4 row_scaled x nvfp4 row_scaled: ",
    ),
    "nvfp4-hot-channels": (
        "--fp4-recipe nvfp4 --recipe-set fprop.hot_channels=0.1", 8, "hot channels 0.1",
    ),
    "nvfp4-late-bf16": ("--fp4-recipe nvfp4-late-bf16", 8, "RHT-16"),
    "nvfp4-fold": ("--fp4-recipe nvfp4-fold", 8, "nvfp4 foldable-up"),
    "nvfp4-4over6": (
        "--fp4-recipe nvfp4-4over6", 12, "nvfp4 4/6 mse max 256 x nvfp4 4/6 mse max 256: ",
    ),
    "nvfp4-4over6-te": ("--fp4-recipe nvfp4-4over6-te", 8, "nvfp4 x nvfp4-2d 4/6 mae max 256: "),
    "if4": ("--fp4-recipe if4", 12, "if4 x if4: "),
    "nvfp4-ue5m3": ("--fp4-recipe nvfp4-ue5m3", 16, "nvfp4-ue5m3 x nvfp4-ue5m3: "),
    "quartet2": ("--fp4-recipe quartet2", 16, "ms-eden x ms-eden: "),
    "torchao-v2": ("--fp4-recipe torchao-v2", 16, "ms-eden torchao x nvfp4: "),
    "torchao-v2-late-bf16": ("--fp4-recipe torchao-v2-late-bf16", 16, "ms-eden torchao x nvfp4: "),
    "nvfp4-backward": ("--fp4-recipe nvfp4-backward", 16, "ms-eden torchao x nvfp4: "),
    "averis": ("--fp4-recipe averis", 16, "mean + nvfp4"),
    "tetrajet2": ("--fp4-recipe tetrajet2", 16, "tetrajet2 x tetrajet2: "),
    "nemotron3-super": (
        "--fp4-recipe nemotron3-super --recipe-set mamba_outputs=none", 6, "nvfp4 x nvfp4-2d: ",
    ),
}  # fmt: skip
LENGTH = 6


@pytest.fixture
def trained(memory, pretrain_here, tmp_path):
    """Function that trains a row once and returns (standard output, steps)."""

    def train(name: str) -> tuple[str, dict]:
        if name not in memory:
            memory[name] = run(pretrain_here, ROWS[name][0], LENGTH, tmp_path / name)
        return memory[name]

    return train


def run(pretrain_here, arguments: str, iterations: int, save: Path) -> tuple[str, dict]:
    length = ("--train-iters", iterations, *ONE_MICROBATCH)
    result = pretrain_here(*arguments.split(), *length, "--save", save)
    done(result)
    return result.stdout, steps(save)


def test_every_shipped_recipe_is_here():
    paths = (ROOT / "recipes").glob("*.yaml")
    # Those of QAT train in tests/conversion/test_qat.py.
    shipped = {path.stem for path in paths if path.stem != "qat"}
    named = {word for arguments, *_ in ROWS.values() for word in arguments.split()}
    assert shipped <= named


# One of each kind; the others' arithmetic is that of tests/numerics and tests/layers.
QUICK = ("fp8-tile", "nvfp4", "averis")


@pytest.mark.parametrize("name", others_slow(ROWS, QUICK))
def test_trains_to_a_lower_loss(trained, name):
    """The loss begins near the entropy of a uniform distribution."""
    _, quantized, shown = ROWS[name]
    output, curve = trained(name)
    assert f"{quantized} of 16 linear layers quantized" in output
    assert shown in " ".join(output.split())
    assert list(curve) == list(range(1, LENGTH + 1))
    assert all(0 < norm < math.inf for _, norm in curve.values())
    assert curve[1][0] == pytest.approx(math.log(512), abs=0.1)
    assert curve[LENGTH][0] < curve[1][0] - 0.7


@pytest.mark.slow
def test_no_two_rows_compute_the_same(trained):
    """Forward quantization changes the first loss, backward quantization its gradient."""
    curves = {name: trained(name)[1] for name in ROWS}
    assert len({tuple(curve.values()) for curve in curves.values()}) == len(ROWS)
    first = {name: curve[1][0] for name, curve in curves.items()}
    assert {name for name in ROWS if first[name] == first["bf16"]} == {"bf16", "mxfp4-backward"}
    assert first["fp8-tile+mxfp4-backward"] == first["fp8-tile"]


def test_delayed_scaling_starts_as_tensorwise_scaling(trained):
    """Both are equal until the history has the configured number of steps."""
    delayed, tensorwise = (trained(name)[1] for name in ("fp8-delayed", "fp8-tensorwise"))
    assert [delayed[step] == tensorwise[step] for step in delayed] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("megatron", "own"), [("blockwise", "fp8-tile"), ("tensorwise", "fp8-tensorwise")]
)
def test_megatron_lm_spelling(trained, pretrain_here, tmp_path, megatron, own):
    """Both spellings have the same table and losses."""
    _, curve = run(pretrain_here, f"--fp8-recipe {megatron}", 2, tmp_path / "run")
    expected = trained(own)[1]
    assert curve == {step: expected[step] for step in (1, 2)}
