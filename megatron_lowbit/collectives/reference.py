"""All-reduce, residual, norm and quantization by ``torch.distributed``, step by step."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.numerics import QuantizedTensor, Request, quantize_both
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm


def all_reduce_norm(
    group: dist.ProcessGroup,
    x: Tensor,
    residual: Tensor | None,
    norm: MXNorm | RMSNorm,
    gain: Tensor | None,
    request: Request | None,
) -> tuple[Tensor, QuantizedTensor | None, Tensor]:
    """Return the normalized rows, their codes if asked for, and the sum (R, C), in x's dtype.

    The ranks' rows are added up in FP32, in the order of the group's library, the residual last.
    RMSNorm's rows are quantized as they are between two layers, in x's dtype; MXNorm's in FP32.
    """
    total = x.to(torch.float32, copy=True)
    dist.all_reduce(total, group=group)
    if residual is not None:
        total = total + residual.float()
    total = total.to(x.dtype)
    block = 1 if request is None else request.quantizer.format.block
    normalized = norm.normalize(total, block)
    if gain is not None:
        normalized = normalized * gain.float()
    rounded = normalized.to(x.dtype)
    if request is None:
        return rounded, None, total
    source = rounded if isinstance(norm, RMSNorm) else normalized
    return rounded, quantize_both(source, request, None)[0], total
