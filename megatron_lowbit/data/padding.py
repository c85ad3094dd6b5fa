"""Documents of a packed micro batch, padded to lengths that context parallelism divides."""

import torch
from torch import Tensor
from torch.utils.data import default_collate


def pad_documents(batch: dict[str, Tensor], multiple: int) -> dict[str, Tensor]:
    """Pad each document to a multiple of a number of tokens, by token 0 without a loss.

    Transformer Engine divides each document into two parts for every context-parallel rank. Samples
    keep their length, so that the last tokens of each are dropped.

    Args:
        batch: micro batch of Megatron-LM's GPTDataset with inter-document masking: tokens, labels,
            loss_mask and position_ids (b, s), cu_seqlens (b, s + 1), in which s follows the last
            boundary, and max_seqlen (b,).
        multiple: divisor of s.
    """
    samples = zip(*batch.values(), strict=True)
    padded: dict[str, Tensor] = default_collate(
        [_pad_sample(dict(zip(batch, each, strict=True)), multiple) for each in samples]
    )
    return padded


def _pad_sample(sample: dict[str, Tensor], multiple: int) -> dict[str, Tensor]:
    length = sample["tokens"].numel()
    starts, ends = sample["cu_seqlens"].long().unique().unfold(0, 2, 1).unbind(1)
    padded = (ends - starts + multiple - 1) // multiple * multiple
    shift = padded.cumsum(0) - padded - starts
    place = torch.arange(length) + shift.repeat_interleave(ends - starts)
    kept = place < length
    result = {}
    for key in ("tokens", "labels", "loss_mask"):
        result[key] = torch.zeros_like(sample[key])
        result[key][place[kept]] = sample[key][kept]
    boundaries = torch.full_like(sample["cu_seqlens"], length)
    boundaries[0] = 0
    boundaries[1 : len(starts) + 1] = padded.cumsum(0).clamp(max=length)
    lengths = boundaries.diff()
    positions = torch.arange(length) - boundaries[:-1].repeat_interleave(lengths)
    return {
        **result,
        "position_ids": positions.to(sample["position_ids"].dtype),
        "cu_seqlens": boundaries,
        "max_seqlen": lengths.max(),
    }
