"""Cross-entropy by liger-kernel's Triton kernels or this project's, in place of Megatron-LM's loss.

They move fewer bytes for each logit: liger-kernel's only read the logits, this project's overwrite
them with their gradient. Models call the method ``compute_language_model_loss`` of their own, also
for each prediction of multi-token prediction, so that an attribute of the model takes its place.
Nothing reads logits again after their loss's backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.errors import UserError, require

CrossEntropy = Callable[[Tensor, Tensor, Any], Tensor]
"""Losses (sequence, batch) in FP32 of logits (sequence, batch, this rank's share of the vocabulary)
in BF16, FP16 or FP32; labels (sequence, batch), int64; and the ranks' group."""


def use_loss(model_config: Any, name: str) -> None:
    """Let the model of a configuration compute its loss by ``--cross-entropy-fusion-impl``.

    ``model_config`` is Megatron-LM's GPTModelConfig or HybridModelConfig, ``name`` ``liger`` or
    ``lowbit``. Raises UserError without liger-kernel, or without a GPU.
    """
    argument = f"--cross-entropy-fusion-impl {name}"
    require(torch.cuda.is_available(), f"{argument}: its kernels need a GPU; give native")
    try:
        hook = partial(replace_losses, cross_entropy_by(name))
    except ImportError as error:
        advice = "pip install 'megatron-lowbit[liger]'"
        raise UserError(f"{argument}: {error}; {advice}") from error
    model_config.pre_wrap_hooks.append(hook)


def cross_entropy_by(name: str) -> CrossEntropy:
    """Import the cross-entropy of ``liger`` or ``lowbit``: both need Triton, as a GPU does."""
    if name == "liger":
        from liger_kernel.megatron import LigerMegatronCrossEntropy

        return LigerMegatronCrossEntropy()
    from megatron_lowbit.layers.cross_entropy import cross_entropy

    return cross_entropy


def replace_losses(
    cross_entropy: CrossEntropy, chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Replace the loss of a model's chunks by :func:`token_losses`; return the chunks."""
    for chunk in chunks:
        chunk.compute_language_model_loss = partial(
            token_losses, cross_entropy, chunk.pg_collection.tp
        )
    return chunks


def token_losses(cross_entropy: CrossEntropy, group: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """Compute the cross-entropy of each token, (batch, sequence) in FP32.

    ``labels`` are indices of the whole vocabulary (batch, sequence), int64; ``logits`` (sequence,
    batch, this rank's share of the vocabulary), which the ranks of ``group`` share.
    """
    return cross_entropy(logits, labels.t(), group).t().contiguous()
