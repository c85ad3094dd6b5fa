"""Distillation from an unquantized teacher (QAD, with a ``qat-*`` recipe: arXiv 2601.20088).

``--distill-from`` replaces the loss of training. With the distributions p of the teacher and q of
the model over the vocabulary, at temperature 1, a token has the loss

    KL(p || q) = sum over v of p[v] (log p[v] - log q[v]),

whose gradient with respect to the model's logits is q - p (Hinton et al., arXiv 1503.02531).
Validation keeps the cross-entropy.

The teacher has the layers of Megatron-LM without the recipe, in the dtype and the parallel layout
of the run. It has no part in the model's checkpoints and parameters. It runs before each forward
pass of the model in training, on the same micro batch, in evaluation mode and without gradients.
"""

from argparse import Namespace
from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.training import get_args
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lowbit.errors import require
from megatron_lowbit.megatron.run.common_state import read_common_state
from megatron_lowbit.megatron.run.errors import say_on_rank_0, translate_load_errors
from megatron_lowbit.megatron.run.load_source import verify_checkpoint
from megatron_lowbit.megatron.run.records import OF_THE_MODEL, changes
from megatron_lowbit.storage import files
from megatron_lowbit.storage.selection import persistent

_OF_TRAINING = (
    "mtp_num_layers", "mtp_use_repeated_layer", "moe_expert_capacity_factor",
    "moe_token_drop_policy",
)  # fmt: skip
"""Attributes of a model that may differ, since they change no logits of a teacher."""
_SHARED = {name: flag for name, flag in OF_THE_MODEL.items() if name not in _OF_TRAINING} | {
    "hidden_size": "--hidden-size", "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads", "kv_channels": "--kv-channels",
}  # fmt: skip
"""Arguments that the teacher must share, by their attributes."""


def distill(model_config: Any, args: Namespace) -> None:
    """Let the model of a configuration learn from the teacher in ``--distill-from``.

    ``model_config`` is Megatron-LM's GPTModelConfig or HybridModelConfig. Raises UserError for a
    folder without a checkpoint.
    """
    checkpoint = Path(args.distill_from)
    if not (checkpoint / files.METADATA).is_file():
        saved = persistent(Namespace(ckpt_step=None), checkpoint)
        require(
            saved is not None,
            f"--distill-from {checkpoint}: no checkpoint, {files.TRACKER} is missing; give a "
            "folder that lowbit-convert to-megatron or --save has written",
        )
        checkpoint = saved.path
    model_config.pre_wrap_hooks.append(partial(_add_teacher, model_config, checkpoint))


def _add_teacher(
    model_config: Any, checkpoint: Path, chunks: Sequence[nn.Module]
) -> Sequence[nn.Module]:
    """Build and load the teacher, and attach it to the only chunk; a ``pre_wrap_hook``."""
    (student,) = chunks
    teacher = _build(model_config, student)
    load_weights(teacher, checkpoint)
    attach(student, teacher)
    say_on_rank_0(f"teacher: {checkpoint}; in training, lm loss is the divergence from it")
    return chunks


def _build(model_config: Any, student: Any) -> nn.Module:
    """Build a model like the student, without a recipe and with weights of 0."""
    config = copy(model_config)
    config.pre_wrap_hooks, config.post_wrap_hooks = [], []
    config.transformer = copy(student.config)
    # Initial values would take random numbers that are the student's.
    config.transformer.perform_initialization = False
    builder = config.get_builder_cls()(config)
    (teacher,) = builder.build_distributed_models(student.pg_collection, wrap_with_ddp=False)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False).zero_()
    return teacher.eval()


def load_weights(model: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint in the format torch_dist, in any parallel layout.

    Rows of the embedding that the checkpoint does not have keep their values. Raises UserError for
    a checkpoint that is damaged or of another model.
    """
    verify_checkpoint(checkpoint)
    changed = changes(get_args(), read_common_state(checkpoint).get("args"), _SHARED)
    require(not changed, f"--distill-from {checkpoint}: a teacher of another model: {changed}")
    with translate_load_errors(f"--distill-from {checkpoint}"):
        metadata = dist_checkpointing.load_content_metadata(str(checkpoint)) or {}
        shards = model.sharded_state_dict(metadata=metadata)
        # Extra states belong to Transformer Engine's FP8, which the teacher does not use.
        shards = {k: shard for k, shard in shards.items() if not isinstance(shard, ShardedObject)}
        model.load_state_dict(dist_checkpointing.load(shards, str(checkpoint)), strict=False)


def attach(student: Any, teacher: nn.Module) -> None:
    """Replace a student's loss in training by the divergence from a teacher.

    ``student`` is a chunk of Megatron-LM with the output layer; ``teacher`` a function of the
    student's inputs without labels, which returns logits (batch, sequence, this rank's share of the
    vocabulary).
    """
    cross_entropy, group = student.compute_language_model_loss, student.pg_collection.tp
    targets: list[Tensor] = []

    def run_teacher(_: nn.Module, inputs: tuple, settings: dict[str, Any]) -> None:
        if student.training:
            with torch.no_grad():
                targets[:] = [teacher(*inputs, **settings | {"labels": None, "loss_mask": None})]

    def losses(labels: Tensor, logits: Tensor) -> Tensor:
        if not student.training:
            return cross_entropy(labels, logits)
        return kl_divergence(logits, targets.pop().transpose(0, 1), group).t().contiguous()

    student.register_forward_pre_hook(run_teacher, with_kwargs=True)
    student.compute_language_model_loss = losses


def kl_divergence(logits: Tensor, teacher: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Compute KL(teacher || model) of each token, (...) in FP32, in nats.

    Temporary memory is five FP32 tensors of the shape of the logits; the backward pass keeps one
    tensor in the dtype of ``logits``.

    Args:
        logits: the model's (..., this rank's share of the vocabulary), in any dtype.
        teacher: the teacher's, of the same shape; they get no gradient.
        group: ranks that share the vocabulary; None for this rank only.
    """
    divergences: Tensor = _Divergence.apply(logits, teacher, group)
    return divergences


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        log_q, log_p = _log_softmax(logits, group), _log_softmax(teacher, group)
        p = log_p.exp()
        divergences = (p * log_p.sub_(log_q)).sum(-1)
        ctx.save_for_backward(log_q.exp_().sub_(p).to(logits.dtype))
        return _all_reduce(divergences, dist.ReduceOp.SUM, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return (difference * grad.unsqueeze(-1)).to(difference.dtype), None, None


def _log_softmax(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Compute this rank's share of the log-probabilities over the whole vocabulary, in FP32."""
    highest = _all_reduce(logits.amax(-1, keepdim=True).float(), dist.ReduceOp.MAX, group)
    shifted = logits.float() - highest
    total = _all_reduce(shifted.exp().sum(-1, keepdim=True), dist.ReduceOp.SUM, group)
    return shifted.sub_(total.log_())


def _all_reduce(x: Tensor, operation: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, operation, group)
    return x
