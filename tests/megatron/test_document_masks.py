"""Attention within documents on a GPU: no token sees one of another document."""

import shlex

import pytest
import torch

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.megatron.forward_step import _documents
from megatron_lowbit.megatron.pretrain import teardown
from megatron_lowbit.megatron.recipe_hook import model_config_of

# isort: split
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

LENGTH, BOUNDARIES = 128, [0, 37, 100, 128]
LINE = f"""
    --num-layers 2 --hidden-size 256 --num-attention-heads 4 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --seq-length {LENGTH} --max-position-embeddings {LENGTH} --micro-batch-size 1 --train-iters 1
    --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 512 --bf16
    --no-gradient-accumulation-fusion --dataloader-inter-document-masking
"""


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8-tile"])
def test_losses_of_a_document_do_not_depend_on_others(recipe, monkeypatch):
    """Scales of fp8-tile's inputs and gradients in dgrad lie within a token."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with teardown():
        args = parse_arguments(shlex.split(f"{LINE} --precision-recipe {recipe}"))
        config = model_config_of(args)
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(5)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        models = [config.get_builder_cls()(config).build_model(groups).cuda()]
        for hook in config.pre_wrap_hooks:
            models = hook(models)
        tokens = torch.randint(512, (1, LENGTH), device="cuda")
        other = tokens.clone()
        first, last = slice(0, BOUNDARIES[1]), slice(BOUNDARIES[2], LENGTH)
        other[:, first] = (tokens[:, first] + 1) % 512
        masked = [losses(models[0], each, BOUNDARIES) for each in (tokens, other)]
        assert torch.equal(masked[0][:, last], masked[1][:, last])
        assert not torch.equal(masked[0][:, first], masked[1][:, first])
        whole = [losses(models[0], each, [0, LENGTH]) for each in (tokens, other)]
        assert not torch.equal(whole[0][:, last], whole[1][:, last])
        torch.testing.assert_close(masked[0][:, first], whole[0][:, first], rtol=0, atol=0.02)


def losses(model: torch.nn.Module, tokens: torch.Tensor, boundaries: list[int]) -> torch.Tensor:
    """Return the loss of each token of a sequence that consists of documents."""
    places = torch.tensor(boundaries, device="cuda", dtype=torch.int32)
    lengths = places[1:] - places[:-1]
    documents = _documents({"cu_seqlens": places[None], "max_seqlen": lengths.max()}, trains=False)
    positions = torch.arange(LENGTH, device="cuda")[None]
    labels = (tokens + 7) % 512
    with torch.no_grad():
        return model(tokens, positions, None, labels=labels, **documents)
