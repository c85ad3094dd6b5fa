"""tools/sensitivity.py: ranks a checkpoint's layers, and its recipe trains."""

import runpy
from functools import partial

import pytest
from tiny_run import ROOT, arguments_for, done

from megatron_lowbit.errors import UserError, exit_on_user_error

main = runpy.run_path(str(ROOT / "tools" / "sensitivity.py"))["main"]


def test_a_recipe_that_keeps_the_worst(pretrain_here, corpus, tmp_path, capsys):
    run, recipe = tmp_path / "run", tmp_path / "mine.yaml"
    done(pretrain_here("--precision-recipe", "bf16", "--train-iters", 3, "--save", run))
    tool = ["--recipe", "nvfp4", "--batches", "2", "--keep", "0.2", "--output", str(recipe)]
    # Its schedule is longer than the batches that are measured.
    more = ("--load", run, "--lr-decay-style", "WSD", "--lr-warmup-iters", 10,
            "--lr-decay-iters", 0, "--lr-wsd-decay-iters", 5)  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        exit_on_user_error(partial(main, [*tool, "--", *arguments_for(corpus, more)]))
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.count("decoder.layers.") >= 16 and "BF16" in shown
    result = pretrain_here(
        "--precision-recipe", recipe, "--load", run, "--finetune", "--train-iters", 2
    )
    done(result)
    kept = recipe.read_text().count("decoder")
    assert 0 < kept < 8
    assert f"recipe mine: {16 - kept} of 16 linear layers quantized" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--recipe", "nvfp4", "--keep", "2", "--", "--load", "x"], "--keep 2: a share"),
        (["--recipe", "nvfp4", "--"], "--load among them, after --"),
        (["--recipe", "nvfp5", "--", "--load", "x"], "nvfp5"),
    ],
)
def test_what_does_not_fit(arguments, named):
    with pytest.raises(UserError, match=named):
        main(arguments)
