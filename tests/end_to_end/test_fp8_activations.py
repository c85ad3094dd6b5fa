"""SwiGLU's input that is kept in FP8, by Megatron-LM's code, under recipes in local layers."""

import pytest
from tiny_run import done, refused, steps

IN_FP8 = "--activation-func-fp8-input-store"
COMMON = ("--precision-recipe", "nvfp4", "--train-iters", 2)


def test_forward_is_unchanged_and_gradients_nearly(pretrain_here, tmp_path):
    done(pretrain_here(*COMMON, "--save", tmp_path / "plain"))
    done(pretrain_here(*COMMON, IN_FP8, "--save", tmp_path / "stored"))
    (plain, second), (stored, other) = (
        list(steps(tmp_path / name).values()) for name in ("plain", "stored")
    )
    assert stored[0] == plain[0] and other != second
    assert stored[1] != plain[1] and stored[1] == pytest.approx(plain[1], rel=0.02)


@pytest.mark.parametrize("more", ["--no-bias-swiglu-fusion", "--use-te-activation-func"])
def test_it_is_refused_where_megatron_lm_ignores_it(pretrain_here, more):
    assert "--activation-func-fp8-input-store needs" in refused(pretrain_here(IN_FP8, more))
