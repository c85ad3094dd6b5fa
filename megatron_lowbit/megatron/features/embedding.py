"""Addition of a token embedding's gradient to its main gradient, without a dense gradient of it.

Megatron-LM's embedding makes a gradient of all rows in the weight's dtype for each micro batch, and
DistributedDataParallel adds it to the main gradient. Here the rows of the micro batch's tokens are
summed in FP32 and added as wgrad of linear layers is: BF16 no longer rounds the sums.
"""

import weakref
from argparse import Namespace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.layers.operands import added_to_main_grads
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.recipes import Recipe


class _Lookup(torch.autograd.Function):
    """Rows (..., K) of a weight (N, K) by ids (...), zeros where an id is masked."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, masked: Tensor | None, weight: Tensor, engine: Engine
    ) -> Tensor:
        ctx.weight, ctx.engine = weight, engine
        if masked is None:
            ctx.save_for_backward(ids)
            return embedding(ids, weight)
        ctx.save_for_backward(ids.masked_fill(masked, -1))
        return embedding(ids.masked_fill(masked, 0), weight).masked_fill_(masked[..., None], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        ctx.engine.add_rows(weight.main_grad, ids.flatten(), grad.reshape(-1, grad.shape[-1]))
        return None, None, added_to_main_grads([weight])[0], None


def _forward(module: VocabParallelEmbedding, engine: Engine, ids: Tensor) -> Tensor:
    """Return ``module``'s own output for ids (b, s) of tokens."""
    group, masked = module.tp_group, None
    if group.size() > 1:
        masked = (ids < module.vocab_start_index) | (ids >= module.vocab_end_index)
        ids = ids - module.vocab_start_index
    rows = _Lookup.apply(ids, masked, module.weight, engine)
    if not module.reduce_scatter_embeddings:
        return reduce_from_tensor_model_parallel_region(rows, group=group)
    rows = rows.transpose(0, 1).contiguous()
    return reduce_scatter_to_sequence_parallel_region(rows, group=group)


class EmbeddingGradients(Feature):
    """Token embeddings of this rank's chunks, which add to their main gradients themselves."""

    @classmethod
    def is_on(cls, args: Namespace, recipe: Recipe) -> bool:
        # FSDP has no main gradients of whole weights that last from one micro batch to the next.
        is_sharded = args.use_megatron_fsdp or args.use_torch_fsdp2
        return args.gradient_accumulation_fusion and not is_sharded

    def install(self) -> None:
        for chunk in self.run.chunks:
            for module in chunk.modules():
                if isinstance(module, VocabParallelEmbedding) and module.gtp_remat_size == 1:
                    module.forward = partial(_forward, weakref.proxy(module), self.run.engine)
                    # Else DistributedDataParallel adds the gradient that autograd makes of an
                    # output layer's zeros, since it would have the embedding's.
                    module.weight.zero_out_wgrad = False
