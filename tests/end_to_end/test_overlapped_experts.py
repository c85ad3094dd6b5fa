"""Experts' all-to-all of a micro batch under the computation of another: the same bits."""

import pytest
from tiny_run import check_same_tensors, steps

from megatron_lowbit.megatron.run.common_state import read_common_state

pytestmark = pytest.mark.slow

RECIPES = {
    "bf16": ("--precision-recipe", "bf16"),
    "fp8-tile": ("--precision-recipe", "fp8-tile"),
    "nvfp4": ("--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none"),
}
# A block without experts, one with two on each of two ranks; three micro batches a step. Dropout
# and the recomputed attention draw random numbers, stochastic rounding derives its own.
MODEL = ("--num-layers", 2, "--moe-layer-freq", "[0,1]", "--num-experts", 4, "--moe-grouped-gemm",
         "--moe-ffn-hidden-size", 64, "--moe-router-load-balancing-type", "aux_loss",
         "--moe-aux-loss-coeff", 0.01, "--hidden-dropout", 0.1, "--attention-dropout", 0.1,
         "--recompute-granularity", "selective", "--expert-model-parallel-size", 2,
         "--moe-token-dispatcher-type", "alltoall", "--global-batch-size", 12, "--train-iters", 2,
         "--save-interval", 1)  # fmt: skip


@pytest.fixture
def runs(memory, pretrain_ranks, tmp_path):
    """Folder of the runs' folders: RECIPE, and RECIPE overlapped."""
    if not memory:
        jobs = {
            f"{recipe}{name}": (*MODEL, *options, *flags, "--save", tmp_path / f"{recipe}{name}")
            for recipe, options in RECIPES.items()
            for name, flags in (
                ("", ()), (" overlapped", ("--overlap-moe-expert-parallel-comm",)),
            )
        }  # fmt: skip
        pretrain_ranks(jobs)
        memory["folder"] = tmp_path
    return memory["folder"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_overlap_changes_no_bit_of_losses_gradients_and_weights(runs, recipe):
    """Adam's first averages are the first step's gradients, times a constant."""
    plain, overlapped = folders = [runs / recipe, runs / f"{recipe} overlapped"]
    flags = [read_common_state(folder / "iter_0000001")["args"] for folder in folders]
    assert [args.overlap_moe_expert_parallel_comm for args in flags] == [False, True]
    assert steps(plain) == steps(overlapped)
    for iteration in (1, 2):
        check_same_tensors(*folders, iteration)


def test_recipes_differ(runs):
    losses = [steps(runs / f"{recipe} overlapped")[2] for recipe in RECIPES]
    assert len(set(losses)) == len(RECIPES)
