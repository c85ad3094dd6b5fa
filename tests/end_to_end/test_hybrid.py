"""Training of hybrids with recipes, and a hybrid that is a GPT.

Layouts are in test_parity.py, exact resumption in test_resume.py.
"""

import pytest
from tiny_run import HYBRID, LATENT, ONE_MICROBATCH, done, losses, steps

from tests.marks import others_slow

RECIPES = {
    "bf16": ("--precision-recipe", "bf16"),
    "fp8-tile": ("--fp8-recipe", "fp8-tile"),
    "nvfp4": ("--fp4-recipe", "nvfp4"),
    "mxfp4-backward": ("--fp4-recipe", "mxfp4-backward"),
}
# Blocks of the tiny model that NVFP4's rule leaves in BF16: 2/62 and 8/62 of 8 are 1 and 1.
QUANTIZED = {"bf16": 0, "fp8-tile": 16, "nvfp4": 12, "mxfp4-backward": 16}


@pytest.mark.parametrize("recipe", others_slow(RECIPES, ("bf16", "nvfp4")))
def test_it_learns(recipe, pretrain_here, tmp_path):
    result = pretrain_here(
        *HYBRID, *RECIPES[recipe], *ONE_MICROBATCH, "--train-iters", 6, "--lr-warmup-iters", 1,
        "--save", tmp_path,
    )  # fmt: skip
    done(result)
    assert f"{QUANTIZED[recipe]} of 16 linear layers quantized" in result.stdout
    found = losses(tmp_path)
    # The words of the made-up language are drawn apart from each other: 300 words, 5.2 nats.
    assert found[1] == pytest.approx(6.3, abs=0.2)
    assert found[6] < found[1] - 0.3


def test_a_pattern_without_mamba_is_a_gpt(pretrain_here, tmp_path):
    """A block of latent attention and one of an MLP are a GPT's layer, in its predictions, too.

    Both models draw their weights in the same order.
    """
    given = (*LATENT, *ONE_MICROBATCH, "--precision-recipe", "fp8-tile", "--train-iters", 2)
    gpt = ("--num-layers", 1, "--mtp-num-layers", 1)
    done(pretrain_here(*given, *gpt, "--save", tmp_path / "gpt"))
    done(pretrain_here(*given, HYBRID[0], "+-/+-", "--save", tmp_path / "hybrid"))
    assert steps(tmp_path / "hybrid") == steps(tmp_path / "gpt")
