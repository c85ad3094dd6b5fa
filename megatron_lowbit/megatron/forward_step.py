"""Megatron-LM's ``forward_step_func``: the forward pass of a microbatch, and its loss."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils.common_utils import is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_lowbit.data.dataset import beyond_rows
from megatron_lowbit.data.padding import pad_documents
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.megatron.run.pipeline import has_mtp

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_DOCUMENT_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""Boundaries of a micro batch's documents, with ``--dataloader-inter-document-masking``."""
_SPIKE_FACTOR = 10
"""Ratio to the largest loss so far from which ``--check-for-spiky-loss`` reports a loss."""

Loss = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


def forward_step(
    data: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Loss]:
    """Run the forward pass of a model chunk on its next microbatch.

    Returns the chunk's output (token losses (b, s) on the last stage), or the schedule plan with
    which Megatron-LM overlaps the communication of experts, and the function that computes the loss
    from the output.
    """
    timers, straggler = get_timers(), utils.StragglerDetector()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        batch = _next_batch(data, utils.get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    run = model
    if return_schedule_plan:
        run = utils.get_attr_wrapped_model(model, "build_schedule_plan")
    with straggler:
        output = run(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            **_documents(batch, model.training),
        )
    return output, partial(_loss, batch["loss_mask"])


def _next_batch(data: Iterator, vp_stage: int | None) -> dict[str, Tensor | None]:
    """Return this rank's part of the next microbatch, with None for tensors of other stages."""
    args = get_args()
    predicts_more, masks = has_mtp(args, vp_stage), args.dataloader_inter_document_masking
    if not (is_first_or_last_pipeline_stage(vp_stage) or predicts_more or masks):
        return dict.fromkeys(_KEYS)
    batch: dict[str, Any] = {}
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    if tensor_rank == 0:
        loaded = next(data)
        _check_ids(loaded, args)
        # Samples of conversations have boundaries, too, of one document each.
        keys = (*_KEYS, *_DOCUMENT_KEYS) if masks else _KEYS
        if args.pad_documents_to_multiple_of > 1:
            loaded = pad_documents(loaded, args.pad_documents_to_multiple_of)
        batch = {
            key: loaded[key].cuda(non_blocking=True) if key in loaded else None for key in keys
        }
    virtual = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    batch = utils.get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=masks,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_more,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(**virtual),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(**virtual),
    )
    batch = utils.flatten_batch_for_packed_sequences(batch)
    group = mpu.get_context_parallel_group()
    return utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def _documents(batch: dict[str, Any], trains: bool) -> dict[str, PackedSeqParams]:
    """Return the argument by which attention stays within documents; none without their masks.

    ``trains``: Megatron-LM counts the FLOPs of attention by these lengths.
    """
    if batch.get("cu_seqlens") is None:
        return {}
    boundaries, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"])
    if trains:
        update_seqlen_stats_from_cu_seqlens(boundaries)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {"packed_seq_params": packed}


def _check_ids(loaded: dict[str, Tensor], args: Namespace) -> None:
    """Raise UserError for token ids without a token or a row in a microbatch on the CPU.

    A tensor-parallel embedding would treat them as another rank's, and train on zeros.
    """
    size, rows = get_tokenizer().vocab_size, args.padded_vocab_size
    # Megatron-LM counts iterations only in training.
    step = f"iteration {args.curr_iteration + 1}" if "curr_iteration" in args else "evaluation"
    for name in ("tokens", "labels"):
        smallest, largest = (int(value) for value in torch.aminmax(loaded[name]))
        if smallest < 0 or largest >= size:
            raise UserError(
                f"{step}: {name} from {smallest} to {largest}, but "
                f"the tokenizer has {size} ids from 0; the data was made with another one, or is "
                "damaged"
            )
        require(largest < rows, f"{step}: the batch {beyond_rows(largest, rows)}")


def _loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the token losses of a microbatch.

    ``loss_mask`` (b, s) has 1.0 for tokens that count and 0.0 for others; ``output`` are token
    losses (b, s). Returns the sum, the number of tokens (int32), and both under Megatron-LM's name
    for its log.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    report = {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}
    _check(loss)
    return loss, tokens, report


def _check(loss: Tensor) -> None:
    """Check a loss as the arguments require, while the GPU computes its gradients.

    Waiting for it before would let the GPU idle until the backward pass begins. The optimizer's
    step comes after all backward passes.
    """
    args = get_args()
    if not (args.check_for_nan_in_loss_and_grad or args.check_for_spiky_loss):
        return
    if not loss.requires_grad:
        _validate(loss)
        return
    copy = loss.detach().to("cpu", non_blocking=True, copy=True)
    copied = torch.cuda.current_stream().record_event() if loss.is_cuda else None

    def validate_copy() -> None:
        if copied is not None:
            copied.synchronize()
        _validate(copy)

    engine = torch.autograd.Variable._execution_engine
    loss.register_hook(lambda _: engine.queue_callback(validate_copy))


def _validate(loss: Tensor) -> None:
    """Check a loss by Megatron-LM's rerun state machine."""
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            message = f"found {name} in local forward loss calculation"
            machine.validate_result(loss, rejects, message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        spikes = partial(machine.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss")
        machine.validate_result(loss, spikes, "Spiky loss", tolerance=0.0, fatal=False)
