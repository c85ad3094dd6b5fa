"""Every shipped recipe trains: down to a lower loss, with the arithmetic that its table shows."""

import math
from pathlib import Path

import pytest
from tiny_run import done, steps

# Arguments, how many of the 16 linear layers they quantize, and what the table says of that.
ROWS = {
    "bf16": ("--precision-recipe bf16", 0, "bf16"),
    "fp8-tile": ("--fp8-recipe fp8-tile", 16, "fp8-1x128-e5m2"),
    "fp8-tile-grad-e4m3": (
        "--fp8-recipe fp8-tile --recipe-set grad.format=fp8-1x128-e4m3", 16, "fp8-1x128-e4m3",
    ),
    "fp8-tile-e4m3": ("--fp8-recipe fp8-tile-e4m3", 4, "fp8-1x128-e4m3"),
    "fp8-tensorwise": ("--fp8-recipe fp8-tensorwise", 16, "fp8-tensor-e4m3"),
    "fp8-delayed": ("--fp8-recipe fp8-delayed", 16, "delayed"),
    "mxfp8": ("--fp8-recipe mxfp8", 16, "mxfp8-e4m3"),
    "mxfp4-backward": ("--fp4-recipe mxfp4-backward", 16, "RHT-64"),
    "fp8-tile+mxfp4-backward": (
        "--fp8-recipe fp8-tile --fp4-recipe mxfp4-backward", 16, "fp8-128x128-e4m3",
    ),
    "mxfp4": ("--fp4-recipe mxfp4", 12, "RHT-32"),
    "nvfp4": ("--fp4-recipe nvfp4", 8, "RHT-16"),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished() -> dict[str, tuple[str, dict]]:
    """Rows that have been trained already: (standard output, steps)."""
    return {}


@pytest.fixture
def trained(finished, pretrain_here, tmp_path):
    """Trains a row for 20 iterations, or remembers it."""

    def train(name: str) -> tuple[str, dict]:
        if name not in finished:
            finished[name] = run(pretrain_here, ROWS[name][0], 20, tmp_path / name)
        return finished[name]

    return train


def run(pretrain_here, arguments: str, iterations: int, save: Path) -> tuple[str, dict]:
    result = pretrain_here(*arguments.split(), "--train-iters", iterations, "--save", save)
    done(result)
    return result.stdout, steps(save)


@pytest.mark.parametrize(
    "name",
    # The row of two recipes has the same backward pass.
    [pytest.param(n, marks=pytest.mark.slow) if n == "mxfp4-backward" else n for n in ROWS],
)
def test_trains_to_a_lower_loss(trained, name):
    """It starts near the uniform distribution's loss and ends clearly below."""
    _, quantized, shown = ROWS[name]
    output, curve = trained(name)
    assert f"{quantized} of 16 linear layers quantized" in output
    assert shown in " ".join(output.split())
    assert list(curve) == list(range(1, 21))
    assert all(0 < norm < math.inf for _, norm in curve.values())
    assert curve[1][0] == pytest.approx(math.log(512), abs=0.1)
    assert max(curve[iteration][0] for iteration in (18, 19, 20)) < curve[1][0] - 0.9


def test_no_two_rows_compute_the_same(trained):
    """Forward quantization shows in the first loss, backward quantization in its gradient."""
    curves = {name: trained(name)[1] for name in ROWS}
    assert len({tuple(curve.values()) for curve in curves.values()}) == len(ROWS)
    first = {name: curve[1][0] for name, curve in curves.items()}
    assert {name for name in ROWS if first[name] == first["bf16"]} == {"bf16", "mxfp4-backward"}
    assert first["fp8-tile+mxfp4-backward"] == first["fp8-tile"]


def test_delayed_scaling_starts_as_tensorwise_scaling(trained):
    """Until 16 steps are recorded, and no longer."""
    delayed, tensorwise = (trained(name)[1] for name in ("fp8-delayed", "fp8-tensorwise"))
    assert [delayed[step] == tensorwise[step] for step in delayed] == [True] * 16 + [False] * 4


@pytest.mark.parametrize(
    ("megatron", "own"),
    [
        ("blockwise", "fp8-tile"),
        ("tensorwise", "fp8-tensorwise"),
        ("delayed", "fp8-delayed"),
    ],
)
def test_megatron_lm_spelling(trained, pretrain_here, tmp_path, megatron, own):
    """Same table, same losses."""
    output, curve = run(pretrain_here, f"--fp8-recipe {megatron}", 2, tmp_path / "run")
    expected, expected_curve = trained(own)
    assert output.partition("parameters")[0] == expected.partition("parameters")[0]
    assert curve == {step: expected_curve[step] for step in (1, 2)}
