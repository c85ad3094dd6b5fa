"""Folding: codes times their block scales, rewritten as FP8 with one scale per tensor.

For power-of-two block scales let 2**K be the largest of a block that is not zero, and 2**k that of
an element's block:

    folded = cast(code * 2**k / 2**K * fold_scale)     to nearest even
    scale  = 2**K / fold_scale * tensor_scale

The cast is to E5M2 for E5M2 elements, and for E2M1 and E3M2 in the left operand of a product whose
right one is not E5M2: it holds them over 28 binades. All others are cast to E4M3. ``fold_scale`` is
the largest power of two with which every code stays an FP8 number: for E4M3 64 (E2M1), 32 (E2M3),
16 (E3M2) and 1 (E4M3). An element is exact unless it falls below the FP8 element's normal range:
its error is then at most half of the least step, which for E4M3 is 2**-18.8 of the tensor's largest
number. Hopper's FP8 tensor cores multiply the result by one scale per tensor.

Where the tensor's own amax is not known, 2**K is the scale of a number that none exceeds: after a
transform of g points, 1.01 sqrt(g) times the amax before it (the hundredth is for rounding).

A format with a tensor scale has block scales relative to the tensor's largest number already: for
NVFP4 with ``foldable`` scales s_b, at most 384,

    folded = cast(code * s_b * fold_scale)             fold_scale 1/8: the largest is 288
    scale  = tensor_scale / fold_scale

which is exact down to E4M3's normal range, 14.2 binades below the tensor's largest number.
"""

import math

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats import FORMATS
from megatron_lowbit.numerics.block_formats.nvfp4 import NVFP4
from megatron_lowbit.numerics.formats import E5M2, decode, encode, unpack_nibbles
from megatron_lowbit.numerics.hadamard import Hadamard
from megatron_lowbit.numerics.quantizer import QuantizedTensor, Quantizer


def folded_format(
    format: BlockFormat, left: bool = False, partner: BlockFormat | None = None
) -> BlockFormat:
    """Return the FP8 format that the left or right operand of a product folds into.

    ``partner`` is the other operand's format; None for a right operand.
    """
    wide = left and partner is not None and partner.element != E5M2
    wide = wide and not format.tensor_scaled and format.element.mantissa_bits <= E5M2.mantissa_bits
    return FORMATS["fp8-tensor-e5m2" if wide or format.element == E5M2 else "fp8-tensor-e4m3"]


def fold_scale(format: BlockFormat, target: BlockFormat) -> float:
    """Return the power of two that codes, or codes times scales, are multiplied by; see above."""
    largest = format.element.max * (format.top_scale if isinstance(format, NVFP4) else 1.0)
    return 2.0 ** math.floor(math.log2(target.element.max / largest))


def largest_after(hadamard: Hadamard | None) -> float:
    """Return the bound of numbers after a transform, as a multiple of the amax before it."""
    return 1.0 if hadamard is None else 1.01 * math.sqrt(hadamard.size)


def fold(
    q: QuantizedTensor, target: BlockFormat | None = None, amax: Tensor | None = None
) -> QuantizedTensor:
    """Fold a matrix (R, K) whose format ``folds``; the result's codes are (R, K) without padding.

    A block that is not finite makes the whole tensor NaN.

    Args:
        q: the matrix.
        target: :func:`folded_format`; None for a right operand's.
        amax: FP32 scalar that no number exceeds; None for the largest scale of the codes.
    """
    element = q.format.element
    target = folded_format(q.format) if target is None else target
    factor = fold_scale(q.format, target)
    codes = unpack_nibbles(q.codes) if element.bits == 4 else q.codes
    numbers = decode(codes, element)
    scales = _scale_of_each(q, codes)
    top = torch.ones((), device=codes.device)
    if numbers.numel() and not q.format.tensor_scaled:
        if amax is None:
            top = torch.where(numbers == 0, 0.0, scales).amax()
            top = torch.where(top == 0, scales.amax(), top)
        else:
            block = amax.expand(q.format.block_rows, q.format.block)
            top = _scale_of_each(Quantizer(q.format)(block), block).amax()
        # Only blocks of zeros have larger scales.
        scales = (scales / top).clamp(max=1.0)
    folded = encode(numbers * (scales * factor), target.element)[:, : q.shape[-1]]
    tensor_scale = top * (1.0 / factor) * q.tensor_scale
    return QuantizedTensor(folded, scales.new_empty((len(codes), 0)), tensor_scale, target, q.shape)


def _scale_of_each(q: QuantizedTensor, codes: Tensor) -> Tensor:
    """Return the block scale of each element, FP32 (R, K)."""
    ones = encode(torch.ones(codes.shape, device=codes.device), q.format.element)
    unit = torch.ones((), device=codes.device)
    return q.format.decode(ones, q.scales, unit).flatten(1)
