"""Infinite activations and gradients: Megatron-LM's checks, and their place in the log."""

import shlex

import pytest
import torch

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.arguments.parse import command_line
from megatron_lowbit.megatron.layers.local import linears_of
from megatron_lowbit.megatron.pretrain import run, teardown
from tests.marks import others_slow

ARGUMENTS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --hidden-dropout 0 --attention-dropout 0 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 2 --lr 1e-2 --train-iters 2 --eval-iters 0
    --eval-interval 100 --log-interval 1 --mock-data --num-workers 0 --tokenizer-type NullTokenizer
    --vocab-size 100 --rerun-mode disabled --quantization-engine reference
"""
MLP = "decoder.layers.1.mlp"


class Infinity(torch.autograd.Function):
    """Identity with one infinite value in the input or in its gradient."""

    @staticmethod
    def forward(ctx, x, backward: bool):
        ctx.backward = backward
        return x if backward else _with_infinity(x)

    @staticmethod
    def backward(ctx, grad):
        return _with_infinity(grad) if ctx.backward else grad, None


def _with_infinity(x):
    x = x.clone()
    x.view(-1)[7] = torch.inf
    return x


def train(recipe: str, backward: bool, *more: str) -> None:
    """Run two iterations with an infinity in fc2's input of the last MLP, or in its gradient."""

    def spoil(chunks):
        linear = linears_of(chunks[0])[f"{MLP}.linear_fc2"]
        linear.register_forward_pre_hook(
            lambda module, inputs: (Infinity.apply(inputs[0], backward), *inputs[1:])
        )
        return chunks

    args = parse_arguments([*shlex.split(ARGUMENTS), "--precision-recipe", *recipe.split(), *more])
    with teardown(), command_line(args.upstream_command_line):
        run(args, [spoil])


@pytest.mark.parametrize("backward", [False, True])
def test_the_run_ends(backward):
    """Amax histories do not hide it; runs of NVFP4 are below."""
    with pytest.raises(RuntimeError, match="Unexpected result nan"):
        train("fp8-delayed", backward)


@pytest.mark.parametrize("backward", others_slow((True, False), (True,)))
def test_the_log_says_where(backward, tmp_path, capsys):
    log = ["--log-quantization-error-interval", "1", "--save", str(tmp_path), "--save-interval=9"]
    with pytest.raises(RuntimeError, match="Unexpected result nan"):
        train("nvfp4 --recipe-set bf16_blocks=none", backward, *log)
    lines = [line for line in capsys.readouterr().out.splitlines() if "nonfinite" in line]
    # SwiGLU's gradient has two values for one.
    first = (
        "linear_fc1 dgrad/grad/nonfinite: 2" if backward else "linear_fc2 fprop/input/nonfinite: 1"
    )
    assert lines == [f"rank 0, iteration 1: {MLP}.{first}, the first of them"]
