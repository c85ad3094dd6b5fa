"""Ranking of a checkpoint's layers by lowbit-study sensitivity, and training with its recipe."""

import shlex
from argparse import Namespace

import pytest

from megatron_lowbit import arguments
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.study import sensitivity
from megatron_lowbit.study.command import main

ARGUMENTS = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2
    --eval-interval 100 --eval-iters 0 --log-interval 1 --save-interval 100
    --mock-data --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 500
    --quantization-engine reference
""")


@pytest.mark.slow
def test_a_recipe_that_keeps_the_worst(tmp_path, capsys):
    run, recipe = tmp_path / "run", tmp_path / "mine.yaml"
    # A schedule longer than the batches that are measured, and the precision of training.
    training = [
        *ARGUMENTS, "--save", str(run), "--train-iters", "3", "--lr", "1e-2",
        "--lr-decay-style", "WSD", "--lr-warmup-iters", "10", "--lr-decay-iters", "20",
        "--lr-wsd-decay-iters", "5",
    ]  # fmt: skip
    pretrain.main([*training, "--precision-recipe", "bf16"])
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    capsys.readouterr()

    tool = ["--recipe", "nvfp4", "--batches", "2", "--keep", "0.2", "--output", str(recipe)]
    main(["sensitivity", *tool, "--", *training, "--load", str(run), "--fp4-recipe", "nvfp4"])
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if "│ decoder.layers." in line]
    assert len(rows) == 16
    kept = [line.split()[1] for line in rows if "BF16" in line]
    assert 0 < len(kept) < 8
    scores = [sum(map(float, (row.split()[3], row.split()[5]))) for row in rows]
    assert scores == pytest.approx(sorted(scores, reverse=True), abs=2e-4)
    assert rows[0].split()[1] in kept
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before

    more = ["--precision-recipe", str(recipe), "--load", str(run), "--finetune", "--lr", "1e-2"]
    pretrain.main([*ARGUMENTS, *more, "--train-iters", "1"])
    shown = capsys.readouterr().out
    assert f"recipe mine: {16 - len(kept)} of 16 linear layers quantized" in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--recipe", "nvfp4", "--keep", "2", "--", "--load", "x"], "--keep 2: a share"),
        (["--recipe", "nvfp4", "--batches", "0", "--", "--load", "x"], "must be positive"),
        (["--recipe", "nvfp4", "--"], "--load among them, after --"),
        (["--recipe", "nvfp4", "--output", __file__, "--", "--load", "x"], "exists; give a new"),
        (["--recipe", "nvfp5", "--", "--load", "x"], "nvfp5"),
        (["--recipe", "nvfp5", "--", "--load=x"], "nvfp5"),
        (["--recipe", "nvfp4", "--", "--lod", "x", "--load", "y"], "--lod"),
    ],
)
def test_invalid_arguments(arguments, named):
    with pytest.raises(UserError, match=named):
        main(["sensitivity", *arguments])


def test_a_recipe_for_a_new_folder(tmp_path, monkeypatch, capsys):
    errors = {"decoder.layers.0.mlp.linear_fc1": sensitivity.LayerErrors(0.2, 0.1, 8)}
    monkeypatch.setattr(sensitivity, "_measure", lambda *_: (errors, True))
    file = tmp_path / "new" / "mine.yaml"
    main(["sensitivity", "--recipe", "nvfp4", "--output", str(file), "--", "--load", "x"])
    assert load_recipe(str(file)).name == "mine"
    inside = tmp_path / "new" / "mine.yaml" / "other.yaml"
    with pytest.raises(UserError, match=r"--output .*mine\.yaml is a file, not a folder"):
        main(["sensitivity", "--recipe", "nvfp4", "--output", str(inside), "--", "--load", "x"])


def test_experts_that_are_not_measured_are_refused(monkeypatch):
    """A machine without CUDA replaces Transformer Engine, which can group experts."""
    parsed = Namespace(num_experts=4, moe_grouped_gemm=False, hybrid_layer_pattern="ME",
                       transformer_impl="transformer_engine")  # fmt: skip
    monkeypatch.setattr(arguments, "parse_arguments", lambda _: parsed)
    with pytest.raises(UserError, match="not measured; add --transformer-impl local"):
        main(["sensitivity", "--recipe", "nvfp4", "--", "--load", "x"])
