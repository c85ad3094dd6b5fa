"""Training of hybrids: recipes, changes of layout, exact resumption."""

import pytest
from tiny_run import HYBRID, LATENT, ONE_MICROBATCH, done, losses, start_from, steps

from tests.marks import others_slow

RECIPES = {
    "bf16": ("--precision-recipe", "bf16"),
    "fp8-tile": ("--fp8-recipe", "fp8-tile"),
    "nvfp4": ("--fp4-recipe", "nvfp4"),
    "mxfp4-backward": ("--fp4-recipe", "mxfp4-backward"),
}
# Blocks of the tiny model that NVFP4's rule leaves in BF16: 2/62 and 8/62 of 8 are 1 and 1.
QUANTIZED = {"bf16": 0, "fp8-tile": 16, "nvfp4": 12, "mxfp4-backward": 16}
TP2 = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", 2)
DISTRIBUTED = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")


@pytest.mark.parametrize(
    "recipe",
    others_slow(RECIPES, ("bf16", "nvfp4")),
)
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


@pytest.fixture
def runs(memory, pretrain_here, pretrain_ranks, tmp_path):
    """Folders of a chain of runs in different layouts, and of an uninterrupted run."""
    if memory:
        return memory["folder"]
    model = (*HYBRID, *DISTRIBUTED, "--lr", 1e-3, "--save-interval", 2)
    done(pretrain_here(*model, "--train-iters", 8, "--save", tmp_path / "whole"))
    start = start_from(tmp_path / "whole", 2, tmp_path / "start")
    jobs, source = {}, start
    for last, (name, layout) in zip((4, 6), {"tp2": TP2, "pp2": PP2}.items(), strict=True):
        jobs[name] = (*model, *layout, "--train-iters", last, "--load", source,
                      "--save", tmp_path / name)  # fmt: skip
        source = tmp_path / name
    pretrain_ranks(jobs)
    for name, begin, last in (("back", source, 8), ("resumed", start, 4)):
        done(
            pretrain_here(*model, "--train-iters", last, "--load", begin, "--save", tmp_path / name)
        )
    memory["folder"] = tmp_path
    return tmp_path


@pytest.mark.slow
def test_layouts_agree_through_checkpoints(runs):
    whole = losses(runs / "whole")
    for name, first in (("tp2", 3), ("pp2", 5), ("back", 7)):
        expected = {step: whole[step] for step in (first, first + 1)}
        assert losses(runs / name) == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_resume_is_exact(runs):
    whole = steps(runs / "whole")
    assert steps(runs / "resumed") == {step: whole[step] for step in (3, 4)}


def test_a_pattern_without_mamba_is_a_gpt(pretrain_here, tmp_path):
    """A block of latent attention and one of an MLP are a GPT's layer, in its predictions, too.

    Both models draw their weights in the same order.
    """
    given = (*LATENT, *ONE_MICROBATCH, "--precision-recipe", "fp8-tile", "--train-iters", 2)
    gpt = ("--num-layers", 1, "--mtp-num-layers", 1)
    done(pretrain_here(*given, *gpt, "--save", tmp_path / "gpt"))
    done(pretrain_here(*given, HYBRID[0], "+-/+-", "--save", tmp_path / "hybrid"))
    assert steps(tmp_path / "hybrid") == steps(tmp_path / "gpt")
