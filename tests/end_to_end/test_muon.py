"""Muon of emerging-optimizers, which needs Python 3.12 as a package, under recipes."""

import re

import pytest
from tiny_run import ONE_MICROBATCH, done, losses, refused, start_from, steps

pytest.importorskip("emerging_optimizers")

MUON = ("--optimizer", "muon", *ONE_MICROBATCH)
NVFP4 = ("--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none")


def test_muon_trains_under_a_recipe_and_resumes_to_the_bit(pretrain_here, tmp_path):
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    done(pretrain_here(*MUON, *NVFP4, "--train-iters", 4, "--save-interval", 2, "--save", whole))
    start_from(whole, 2, rest)
    done(pretrain_here(*MUON, *NVFP4, "--train-iters", 4, "--load", rest, "--save", rest))
    assert steps(rest) == {step: values for step, values in steps(whole).items() if step > 2}
    for name, other in (("bf16", MUON), ("adam", (*NVFP4, *ONE_MICROBATCH))):
        done(pretrain_here(*other, "--train-iters", 2, "--save", tmp_path / name))
    # The first loss does not depend on the optimizer, and every loss on the recipe.
    muon, bf16, adam = losses(whole), losses(tmp_path / "bf16"), losses(tmp_path / "adam")
    assert muon[1] == adam[1] and muon[2] != adam[2]
    for step in (1, 2):
        assert muon[step] == pytest.approx(bf16[step], rel=0.01) and muon[step] != bf16[step]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quantized-param-gather", "--bf16", "--use-distributed-optimizer"),
         "--quantized-param-gather needs --optimizer adam"),
        (("--use-distributed-optimizer",), "dist_muon, or muon with .*, needs --bf16"),
    ],
)  # fmt: skip
def test_what_muon_does_not_go_with_is_refused_in_one_line(options, message, pretrain_here):
    result = pretrain_here(*MUON, *NVFP4, "--train-iters", 1, *options)
    assert re.search(message, refused(result))
