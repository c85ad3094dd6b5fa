"""Formats by their names, and quantization of a tensor in one call."""

from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.errors import require_type
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats import FORMATS
from megatron_lowbit.numerics.extra_formats import load_entry_points
from megatron_lowbit.numerics.hadamard import Hadamard
from megatron_lowbit.numerics.quantizer import QuantizedTensor, Quantizer, Rounding
from megatron_lowbit.numerics.randomness import Draw


def format_by_name(name: str, **options: Any) -> BlockFormat:
    """Return the format of that name, with some of its options set.

    Raises:
        ValueError: no such format, option or value; the message says which are near or there.
        TypeError: no name.
    """
    require_type("the format", name, str, "a format's name")
    if name not in FORMATS:
        load_entry_points()
    if name not in FORMATS:
        near = [known for known in FORMATS if name in known] or get_close_matches(name, FORMATS)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(FORMATS)}"
        raise ValueError(f"unknown format {name!r}; {hint}")
    return FORMATS[name].with_options(**options)


def quantize(
    x: Tensor,
    format: str,
    *,
    axis: int = -1,
    rounding: str = "nearest",
    hadamard: int | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> QuantizedTensor:
    """Quantize a tensor.

    Args:
        x: FP32 or BF16, at least one axis.
        format: a format's name, a key of ``numerics.FORMATS``: ``nvfp4`` (blocks 1x16),
            ``nvfp4-2d`` (16x16), ``mxfp4``, ``mxfp6-e2m3``, ``mxfp6-e3m2``, ``mxfp8-e4m3``,
            ``mxfp8-e5m2`` (1x32; with ``-2d`` 32x32), ``fp8-1x128-e4m3``, ``fp8-128x128-e4m3``,
            ``fp8-tensor-e4m3``, ``fp8-row-e4m3`` (each also with ``-e5m2``); ``nvfp4-ue5m3`` (also
            with ``-2d``), ``quartet2``, ``ms-eden`` (1x16), ``tetrajet2`` (1x16 within 1x128);
            ``if4`` (1x16); ``int4-1x32``, ``int4-1x128``.
        axis: the axis that blocks run along. It becomes the last axis of the result: ``axis=0``
            of a matrix quantizes its transpose.
        rounding: ``nearest`` or ``stochastic``.
        hadamard: size of a random Hadamard transform with the fixed signs along the block axis,
            before quantization.
        generator: seeds the key of stochastic rounding; None takes torch's default CPU generator.
        options: the format's own: ``scale_rounding`` (floor, rceil, ceil, even) and
            ``three_quarters`` of MX formats, ``scale_format`` (fp32, pow2) of FP8, ``block_scales``
            (e4m3, foldable, foldable-up), ``four_over_six`` (none, mse, mae, abs_max),
            ``max_scale`` (448, 256), ``sixteen_seventeenths`` and ``row_scaled`` of NVFP4,
            ``selection`` (mse, mae, abs_max) and ``sixteen_seventeenths`` of ``if4``,
            ``tensor_scaled`` of ``nvfp4-ue5m3``, ``block`` of MX formats (32, 16) and of FP8 tiles
            (128, 64, 32, 16).

    Raises:
        ValueError: unknown format, option or rounding, a bad Hadamard size, or x without axes.
        TypeError: x is no tensor, or neither FP32 nor BF16; no format's name.
    """
    require_type("x", x, Tensor, "a tensor")
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"quantize takes float32 or bfloat16, not {x.dtype}")
    if x.ndim == 0:
        raise ValueError("quantize needs a tensor with at least one axis")
    choices = [member.value for member in Rounding]
    if rounding not in choices:
        raise ValueError(f"unknown rounding {rounding!r}; use one of {', '.join(choices)}")
    quantizer = Quantizer(format_by_name(format, **options), Rounding(rounding))
    draw = None
    if quantizer.rounding is Rounding.STOCHASTIC:
        draw = Draw(int(torch.randint(2**63 - 1, (), generator=generator)))
    transform = None if hadamard is None else Hadamard(hadamard)
    return quantizer(x.movedim(axis, -1), hadamard=transform, draw=draw)
