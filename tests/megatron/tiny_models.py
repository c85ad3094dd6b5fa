"""Tiny models of Megatron-LM, built on the ranks of this process's group or trained."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.megatron.pretrain import teardown
from megatron_lowbit.megatron.recipe_hook import model_config_of

# isort: split
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

TINY = """
    --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --normalization RMSNorm
    --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 2
    --lr 1e-2 --eval-iters 0 --log-interval 1 --save-interval 100 --mock-data --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 100 --quantization-engine reference
"""
"""Arguments without blocks, activation and positions; later ones replace them."""


@contextmanager
def one_rank(backend: str = "gloo") -> Iterator[None]:
    """Give this process a group of its own for what is built inside the context."""
    with pytest.MonkeyPatch.context() as patch, teardown():
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        yield


def built(line: str, device: str = "cpu") -> torch.nn.Module:
    """Build this rank's part of a command line's model, with its recipe."""
    args = parse_arguments(shlex.split(line))
    config = model_config_of(args)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    model_parallel_cuda_manual_seed(5)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = [config.get_builder_cls()(config).build_model(groups).to(device)]
    for hook in config.pre_wrap_hooks:
        chunks = hook(chunks)
    return chunks[0]
