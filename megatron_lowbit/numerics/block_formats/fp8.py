"""FP8 with FP32 scales: one per tile of 1xT or TxT, T of 128, or one per tensor.

Source: DeepSeek-V3's tiles, in the operation order of Transformer Engine's blockwise and
current-scaling quantizers. All scale arithmetic is FP32:

    encode = max / amax          max = 448 (E4M3) or 57344 (E5M2); ``pow2``: mantissa cut off
    code   = cast(x * encode)    saturating
    scale  = 1 / encode          stored

An amax of zero gives encode 1, and a quotient beyond FP32 its largest value. An infinity or a NaN
makes the scale and all values of its tile, or of the tensor, NaN. (Transformer Engine takes encode
1 for such an amax: an infinite element saturates.) At the very top of FP32's range a code that was
rounded up may decode to infinity (with ``pow2`` scales the code of 3.4e38 does).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_lowbit.numerics.block_format import (
    BlockFormat,
    Encoded,
    block_amax,
    blocks,
    encode_scale,
    finite_amax,
)
from megatron_lowbit.numerics.formats import E4M3, E5M2, ElementFormat, encode

TILE = 128


def _encode_scale(amax: Tensor, element: ElementFormat, scale_format: str) -> Tensor:
    scale = encode_scale(amax, element.max)
    if scale_format == "pow2":
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax.isnan(), amax, scale)  # without its mantissa it would be infinity


@dataclass(frozen=True)
class FP8Tile(BlockFormat):
    """A scale for each tile of 1x128 or 128x128 elements; another ``block`` is for study.

    ``scales`` are FP32 decode scales (R/block_rows, K/block), compact.
    """

    scale_format: Literal["fp32", "pow2"] = "fp32"
    block: int = TILE  # type: ignore[misc]  # the other formats' is their class's

    scale_bits = 32
    scale_dtype = torch.float32
    repeats_scales = False
    # A program of the kernels holds a tile; one of 256x256 is too large.
    OPTIONS: ClassVar = {"scale_format": ("fp32", "pow2"), "block": (TILE, 64, 32, 16)}

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True for power-of-two scales."""
        return self.scale_format == "pow2"

    exact_in_bf16 = folds

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        """Quantize whole tiles; tensor_scale is 1."""
        tiles = blocks(x, self.block_rows, self.block)
        scale = _encode_scale(block_amax(tiles), self.element, self.scale_format)
        codes = encode((tiles * scale).view(x.shape), self.element, uniform)
        return codes, (1.0 / scale).squeeze(-1).squeeze(1), torch.ones_like(amax)


@dataclass(frozen=True)
class FP8Tensor(BlockFormat):
    """One scale for the tensor, ``tensor_scale``; ``scales`` is empty, (R, 0)."""

    scale_format: Literal["fp32", "pow2"] = "fp32"

    block = 1
    tensor_scaled = True
    exact_in_bf16 = True
    scale_bits = 0
    scale_dtype = torch.float32
    OPTIONS: ClassVar = {"scale_format": ("fp32", "pow2")}

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        """Quantize by the given amax, which need not be x's own: what exceeds it saturates."""
        scale = _encode_scale(finite_amax(amax), self.element, self.scale_format)
        codes = encode(x * scale, self.element, uniform)
        return codes, x.new_empty((x.shape[0], 0)), 1.0 / scale


FORMATS = (
    *(
        FP8Tile(f"fp8-{rows}x{TILE}-{element.name}", element, rows)
        for rows in (1, TILE)
        for element in (E4M3, E5M2)
    ),
    *(FP8Tensor(f"fp8-tensor-{element.name}", element, 1) for element in (E4M3, E5M2)),
)
