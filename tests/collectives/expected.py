"""Results of a call of the operation by the reference, and their bits."""

import torch

from megatron_lowbit.collectives.all_reduce_norm import Result
from megatron_lowbit.numerics.rmsnorm import RMSNorm


def expected(xs, residual, norm, gain, quantizer, keep_rows=False):
    """Return sums in the order of ranks, normalized and quantized; and the sums.

    RMSNorm's rows are quantized in x's dtype, as a layer behind a norm would.
    """
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    if residual is not None:
        total = total + residual.float()
    total = total.to(xs[0].dtype)
    normalized = norm.normalize(total, 16 if quantizer is None else quantizer.format.block)
    if gain is not None:
        normalized = normalized * gain.float()
    rows = normalized.to(total.dtype)
    if quantizer is None:
        return Result(rows, None, total)
    codes = quantizer(rows if isinstance(norm, RMSNorm) else normalized)
    return Result(rows if keep_rows else None, codes, total)


def bits(result) -> list[torch.Tensor]:
    """Return the tensors to compare of a result."""
    tensors = [tensor for tensor in (result.normalized, result.total) if tensor is not None]
    if (made := result.quantized) is not None:
        scales = made.scales.view(torch.uint8)
        tensors += [made.codes.view(torch.uint8), scales, made.tensor_scale]
    return tensors
