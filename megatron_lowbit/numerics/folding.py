"""Folding: codes with power-of-two block scales, rewritten as FP8 with one power of two a tensor.

Let 2**K be the largest scale of a block that is not zero, and 2**k the scale of an element's block:

    folded = cast(code * 2**k / 2**K * lift)     to nearest even; E5M2 for E5M2, else E4M3
    scale  = 2**K / lift * tensor_scale

``lift`` is the largest power of two with which every code stays an FP8 number: 64 for E2M1, 32 for
E2M3, 16 for E3M2, 1 for E4M3 and E5M2. An element is exact unless it falls below the FP8 element's
normal range: its error is then at most half of the least step, which for E4M3 is 2**-18.8 of the
tensor's largest number. Hopper's FP8 tensor cores multiply the result by one scale a tensor.
"""

import math

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats import FORMATS
from megatron_lowbit.numerics.formats import E5M2, decode, encode, unpack_nibbles
from megatron_lowbit.numerics.quantizer import QuantizedTensor


def folded_format(format: BlockFormat) -> BlockFormat:
    """Return the FP8 format that a format with power-of-two scales folds into."""
    return FORMATS["fp8-tensor-e5m2" if format.element == E5M2 else "fp8-tensor-e4m3"]


def lift(format: BlockFormat) -> float:
    """Return the power of two that codes are multiplied by; see above."""
    largest = folded_format(format).element.max / format.element.max
    return 2.0 ** math.floor(math.log2(largest))


def fold(q: QuantizedTensor) -> QuantizedTensor:
    """Fold a matrix (R, K) whose format ``folds``; the result's codes are (R, K) without padding.

    A block that is not finite makes the whole tensor NaN.
    """
    element, target = q.format.element, folded_format(q.format)
    codes = unpack_nibbles(q.codes) if element.bits == 4 else q.codes
    numbers = decode(codes, element)
    scales = _scale_of_each(q, codes)
    top = torch.where(numbers == 0, 0.0, scales).amax() if numbers.numel() else scales.new_zeros(())
    top = torch.where(top == 0, scales.amax() if scales.numel() else 1.0, top)
    # Only blocks of zeros have larger scales.
    ratio = (scales / top).clamp(max=1.0) * lift(q.format)
    folded = encode(numbers * ratio, target.element)[:, : q.shape[-1]]
    tensor_scale = top * (1.0 / lift(q.format)) * q.tensor_scale
    return QuantizedTensor(folded, scales.new_empty((len(codes), 0)), tensor_scale, target, q.shape)


def _scale_of_each(q: QuantizedTensor, codes: Tensor) -> Tensor:
    """Return the block scale of each element, FP32 (R, K)."""
    ones = encode(torch.ones(codes.shape, device=codes.device), q.format.element)
    one = torch.ones((), device=codes.device)
    return q.format.decode(ones, q.scales, one).flatten(1)
