"""Runs with stored weights in Transformer Engine's layers: the losses of those with BF16 ones."""

import subprocess
import sys

import pytest
import torch
from tiny_run import ENVIRONMENT, ROOT, arguments_for, check_same_tensors, done, start_from, steps

pytestmark = pytest.mark.gpu
STORED = "--quantized-param-gather"
# Attention and sums in one order: what is compared is a run with itself.
COMMON = ("--bf16", "--transformer-impl", "transformer_engine", "--attention-backend", "unfused",
          "--quantization-engine", "auto", "--no-gradient-accumulation-fusion",
          "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable",
          "--train-iters", 8, "--save-interval", 4)  # fmt: skip
RECIPES = {
    "fp8-tile": ("--precision-recipe", "fp8-tile"),
    "nvfp4": ("--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none"),
    "mxfp8": ("--precision-recipe", "mxfp8", "--eval-precision", "recipe"),
}
EVALUATED = ("--eval-interval", 4, "--eval-iters", 1)


@pytest.fixture
def pretrain(corpus):
    """Function that runs pretrain_gpt.py on so many ranks, a GPU each."""

    def run(ranks: int, *arguments: object) -> subprocess.CompletedProcess:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py")]
        command += arguments_for(corpus, arguments)
        environment = {**ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return run


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_losses(recipe, ranks, pretrain, tmp_path):
    """Compare losses, gradient norms and checkpoints without stored weights, with, and resumed."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Transformer Engine's own kernels compute these recipes")
    given = (*COMMON, *EVALUATED, *RECIPES[recipe])
    done(pretrain(ranks, *given, "--save", tmp_path / "plain"))
    stored = pretrain(ranks, *given, STORED, "--save", tmp_path / "stored")
    done(stored)
    assert "weights as codes" in stored.stdout
    resumed = start_from(tmp_path / "stored", 4, tmp_path / "resumed")
    done(pretrain(ranks, *given, STORED, "--save", resumed, "--load", resumed))
    plain = steps(tmp_path / "plain")
    assert len(plain) == 8
    assert steps(tmp_path / "stored") == plain
    assert steps(resumed) == {step: plain[step] for step in range(5, 9)}
    check_same_tensors(tmp_path / "stored", tmp_path / "plain", 8)
