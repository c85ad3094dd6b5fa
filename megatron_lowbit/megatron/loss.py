"""Cross-entropy by liger-kernel's Triton kernels, for ``--cross-entropy-fusion-impl liger``.

They compute what Megatron-LM's own loss does, with fewer passes over the logits, which they only
read. Models call the method ``compute_language_model_loss`` of their own, also for each prediction
of multi-token prediction, so that an attribute of the model takes its place.
"""

from types import MethodType
from typing import Any

import torch

from megatron_lowbit.errors import UserError, require

_ARGUMENT = "--cross-entropy-fusion-impl liger"


def use_liger_loss(model_config: Any) -> None:
    """Let the model of a configuration compute its loss by liger-kernel.

    Args:
        model_config: Megatron-LM's GPTModelConfig or HybridModelConfig.

    Raises:
        UserError: liger-kernel is not installed, or there is no GPU.
    """
    require(torch.cuda.is_available(), f"{_ARGUMENT}: its kernels need a GPU; give native")
    try:
        import liger_kernel.megatron  # noqa: F401
    except ImportError as error:
        advice = "pip install 'megatron-lowbit[liger]'"
        raise UserError(f"{_ARGUMENT}: {error}; {advice}") from error
    model_config.pre_wrap_hooks.append(replace_losses)


def replace_losses(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Replace the loss of a model's chunks by :func:`token_losses`; return the chunks."""
    for chunk in chunks:
        chunk.compute_language_model_loss = MethodType(token_losses, chunk)
    return chunks


def token_losses(chunk: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Compute the cross-entropy of each token.

    Args:
        chunk: part of a model, which knows its tensor-parallel group.
        labels: indices of the whole vocabulary (batch, sequence), int64. A token with label -100
            has no loss and no gradient.
        logits: (sequence, batch, this rank's share of the vocabulary), BF16, FP16 or FP32.

    Returns:
        Losses (batch, sequence) in FP32.
    """
    from liger_kernel.megatron import LigerMegatronCrossEntropy

    losses = LigerMegatronCrossEntropy()(logits, labels.t(), chunk.pg_collection.tp)
    return losses.t().contiguous()
