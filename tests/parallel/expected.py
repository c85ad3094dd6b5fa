"""What a call of the operation gives, by the reference, and its bits."""

import torch


def expected(xs, residual, norm, gain, quantizer):
    """Sums in the order of ranks, normalized and quantized; and the sums."""
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    if residual is not None:
        total = total + residual.float()
    total = total.to(xs[0].dtype)
    normalized = norm.normalize(total, 16 if quantizer is None else quantizer.format.block)
    if gain is not None:
        normalized = normalized * gain.float()
    return normalized.to(total.dtype) if quantizer is None else quantizer(normalized), total


def bits(made, total=None) -> list[torch.Tensor]:
    """The tensors to compare of a result."""
    sums = [] if total is None else [total]
    if isinstance(made, torch.Tensor):
        return [made, *sums]
    scales = made.scales.view(torch.uint8)
    return [made.codes.view(torch.uint8), scales, made.tensor_scale, *sums]
