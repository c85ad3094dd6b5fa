"""Runs of Megatron-LM's training loop in this process, on made-up data, and what they multiply."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowbit.checkpoints.reader import CheckpointReader, TensorSlice
from megatron_lowbit.layers import operands
from megatron_lowbit.megatron.pretrain import main
from megatron_lowbit.megatron.run.common_state import read_common_state
from megatron_lowbit.numerics import QuantizedTensor
from megatron_lowbit.storage import files

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 128 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --max-position-embeddings 32 --vocab-size 500 --hidden-dropout 0 --attention-dropout 0
""")
_LOOP = shlex.split("""
    --seq-length 32 --micro-batch-size 2 --global-batch-size 2 --lr 1e-2 --lr-decay-iters 100
    --eval-iters 0 --eval-interval 100 --log-interval 1 --save-interval 100 --mock-data
    --num-workers 0 --tokenizer-type NullTokenizer
    --quantization-engine reference
""")


def train(*arguments: object) -> None:
    """Run the arguments, after the arguments that all these runs have."""
    main([*_LOOP, *map(str, arguments)])


def losses(save: Path) -> dict[int, float]:
    """Return the training loss by iteration of the run that saved there."""
    lines = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


def model_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the model's tensors in an iteration's folder, each as it is on all ranks together."""
    reader = CheckpointReader(path)
    return {key: reader.read(TensorSlice(key)) for key in reader.model}


def record_weights(patch: pytest.MonkeyPatch) -> list[QuantizedTensor]:
    """Return a list to which every forward pass adds its quantized weights."""
    weights, original = [], operands.quantize_weight

    def recording(*arguments):
        operands_of_call = original(*arguments)
        weights.append(operands_of_call[0])
        return operands_of_call

    patch.setattr(operands, "quantize_weight", recording)
    return weights


def change_args(path: Path, **changes: Any) -> None:
    """Give a checkpoint's folder other arguments, in the file where older ones keep them.

    Megatron-LM reads that file first, too.
    """
    common = read_common_state(path)
    vars(common["args"]).update(changes)
    torch.save(common, path / "common.pt")
    files.write_document(path, {"files": files.checksums(path)})
