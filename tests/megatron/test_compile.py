"""Local linear layers under torch.compile have the losses of eager ones."""

import json
import shlex

import pytest

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.arguments.parse import command_line
from megatron_lowbit.megatron.layers.local import linears_of
from megatron_lowbit.megatron.pretrain import run, teardown

ARGUMENTS = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --hidden-dropout 0 --attention-dropout 0 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-2 --train-iters 3 --eval-iters 0
    --eval-interval 100 --log-interval 1 --save-interval 100 --mock-data --vocab-size 100
    --num-workers 0 --tokenizer-type NullTokenizer --quantization-engine reference
    --precision-recipe nvfp4 --recipe-set bf16_blocks=none
"""


def losses(folder, *hooks):
    args = parse_arguments([*shlex.split(ARGUMENTS), "--save", str(folder)])
    with teardown(), command_line(args.upstream_command_line):
        run(args, hooks)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["lm_loss"], line["grad_norm"]) for line in lines]


def compile_linears(chunks):
    for module in linears_of(chunks[0]).values():
        module.compile(backend="aot_eager")
    return chunks


@pytest.mark.slow
def test_losses(tmp_path):
    """Each microbatch has its own random numbers; a traced constant key would change losses."""
    assert losses(tmp_path / "compiled", compile_linears) == losses(tmp_path / "eager")
