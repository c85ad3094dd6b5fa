"""Folding: codes times their block scales, rewritten as FP8 with one scale a tensor.

For power-of-two block scales let 2**K be the largest of a block that is not zero, and 2**k that of
an element's block:

    folded = cast(code * 2**k / 2**K * lift)     to nearest even; E5M2 for E5M2, else E4M3
    scale  = 2**K / lift * tensor_scale

``lift`` is the largest power of two with which every code stays an FP8 number: 64 for E2M1, 32 for
E2M3, 16 for E3M2, 1 for E4M3 and E5M2. An element is exact unless it falls below the FP8 element's
normal range: its error is then at most half of the least step, which for E4M3 is 2**-18.8 of the
tensor's largest number. Hopper's FP8 tensor cores multiply the result by one scale a tensor.

A format with a tensor scale has block scales relative to the tensor's largest number already: for
NVFP4 with ``foldable`` scales s_b, at most 384,

    folded = cast(code * s_b * lift)             lift 1/8: the largest is 288
    scale  = tensor_scale / lift

which is exact down to E4M3's normal range, 14.2 binades below the tensor's largest number.
"""

import math

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats import FORMATS
from megatron_lowbit.numerics.block_formats.nvfp4 import NVFP4
from megatron_lowbit.numerics.formats import E5M2, decode, encode, unpack_nibbles
from megatron_lowbit.numerics.quantizer import QuantizedTensor


def folded_format(format: BlockFormat) -> BlockFormat:
    """Return the FP8 format that a format folds into."""
    return FORMATS["fp8-tensor-e5m2" if format.element == E5M2 else "fp8-tensor-e4m3"]


def lift(format: BlockFormat) -> float:
    """Return the power of two that codes, or codes times scales, are multiplied by; see above."""
    largest = format.element.max * (format.max_scale if isinstance(format, NVFP4) else 1.0)
    return 2.0 ** math.floor(math.log2(folded_format(format).element.max / largest))


def fold(q: QuantizedTensor) -> QuantizedTensor:
    """Fold a matrix (R, K) whose format ``folds``; the result's codes are (R, K) without padding.

    A block that is not finite makes the whole tensor NaN.
    """
    element, target = q.format.element, folded_format(q.format)
    codes = unpack_nibbles(q.codes) if element.bits == 4 else q.codes
    numbers = decode(codes, element)
    scales = _scale_of_each(q, codes)
    top = torch.ones((), device=codes.device)
    if numbers.numel() and not q.format.tensor_scaled:
        top = torch.where(numbers == 0, 0.0, scales).amax()
        top = torch.where(top == 0, scales.amax(), top)
        # Only blocks of zeros have larger scales.
        scales = (scales / top).clamp(max=1.0)
    folded = encode(numbers * (scales * lift(q.format)), target.element)[:, : q.shape[-1]]
    tensor_scale = top * (1.0 / lift(q.format)) * q.tensor_scale
    return QuantizedTensor(folded, scales.new_empty((len(codes), 0)), tensor_scale, target, q.shape)


def _scale_of_each(q: QuantizedTensor, codes: Tensor) -> Tensor:
    """Return the block scale of each element, FP32 (R, K)."""
    ones = encode(torch.ones(codes.shape, device=codes.device), q.format.element)
    one = torch.ones((), device=codes.device)
    return q.format.decode(ones, q.scales, one).flatten(1)
