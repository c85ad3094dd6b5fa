"""Runs whose layers are captured in CUDA graphs: the losses of those that are not."""

import json

import pytest
from tiny_run import done, start_from, steps

pytestmark = pytest.mark.gpu
LAYERS = {
    "local": ("--transformer-impl", "local", "--no-persist-layer-norm", "--no-rope-fusion",
              "--no-masked-softmax-fusion"),
    "transformer_engine": ("--transformer-impl", "transformer_engine"),
}  # fmt: skip
# Attention and sums in one order: what is compared is a run with itself.
COMMON = ("--bf16", "--attention-backend", "unfused", "--quantization-engine", "auto",
          "--train-iters", 8, "--save-interval", 4)  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "implementation"),
    [
        ("local", "transformer_engine"),
        ("transformer_engine", "local"),
        ("transformer_engine", "transformer_engine"),
    ],
)
@pytest.mark.parametrize(
    "recipe", ["bf16", "fp8-tile", "mxfp8", "nvfp4", "mxfp4-backward", "fp8-delayed"]
)
def test_the_same_losses(recipe, implementation, layers, pretrain_command, tmp_path):
    """Compare runs without graphs, with them, and resumed with them; of two microbatches."""
    given = (*COMMON, *LAYERS[layers], "--precision-recipe", recipe)
    graphs = ("--cuda-graph-impl", implementation)
    done(pretrain_command(*given, "--save", tmp_path / "plain"))
    done(pretrain_command(*given, *graphs, "--save", tmp_path / "captured"))
    resumed = start_from(tmp_path / "captured", 4, tmp_path / "resumed")
    done(pretrain_command(*given, *graphs, "--save", resumed, "--load", resumed))
    plain = steps(tmp_path / "plain")
    assert len(plain) == 8
    assert steps(tmp_path / "captured") == plain
    assert steps(resumed) == {step: plain[step] for step in range(5, 9)}


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_validation_in_bf16_between_captured_steps(recipe, pretrain_command, tmp_path):
    validation = ("--eval-interval", 2, "--eval-iters", 2)
    given = (*COMMON, *LAYERS["transformer_engine"], "--precision-recipe", recipe, *validation)
    done(pretrain_command(*given, "--save", tmp_path / "plain"))
    done(pretrain_command(*given, "--cuda-graph-impl", "local", "--save", tmp_path / "captured"))
    plain, captured = (
        [
            (line["iteration"], line.get("lm_loss"), line.get("validation_loss"))
            for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
        ]
        for name in ("plain", "captured")
    )
    assert captured == plain and len(plain) == 8 and all(loss for *_, loss in plain[1::2])


def test_a_switch_is_captured_again(pretrain_command, tmp_path):
    switch = "switches.heal={iteration: 4, to: bf16}"
    layers = LAYERS["transformer_engine"]
    given = (*COMMON, *layers, "--precision-recipe", "nvfp4", "--recipe-set", switch)
    done(pretrain_command(*given, "--save", tmp_path / "plain"))
    captured = pretrain_command(
        *given, "--cuda-graph-impl", "local", "--save", tmp_path / "captured"
    )
    done(captured)
    assert "iteration 4: recipe" in captured.stdout
    assert steps(tmp_path / "captured") == steps(tmp_path / "plain")
