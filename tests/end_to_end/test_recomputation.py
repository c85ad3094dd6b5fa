"""Modules that Megatron-LM recomputes without keeping their output: the same bits."""

import pytest
from tiny_run import LATENT, ONE_MICROBATCH, done, steps

# isort: split
from megatron.core.tensor_parallel import random

MODEL = (*LATENT, "--num-layers", 1, "--num-experts", 4, "--moe-grouped-gemm",
         "--moe-ffn-hidden-size", 64, "--precision-recipe", "nvfp4", "--recipe-set",
         "bf16_blocks=none", *ONE_MICROBATCH, "--train-iters", 2)  # fmt: skip
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")


@pytest.fixture
def losses_with(memory, pretrain_here, tmp_path, monkeypatch):
    """Function of further arguments that returns the losses and gradient norms of a run."""
    # A machine may lack ninja, which compiles Megatron-LM's extension.
    monkeypatch.setattr(random, "load_inline", None)

    def run(*arguments):
        if arguments not in memory:
            save = tmp_path / "saved"
            done(pretrain_here(*MODEL, *arguments, "--save", save))
            memory[arguments] = steps(save)
        return memory[arguments]

    return run


@pytest.mark.parametrize("module", ["layernorm", "moe_act", "mla_up_proj"])
def test_recomputation_changes_no_bit(losses_with, module):
    plain = losses_with()
    assert len(plain) == 2
    assert losses_with(*SELECTIVE, module) == plain
