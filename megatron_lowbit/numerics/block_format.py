"""Base class of block-scaled formats: an element format, a block, and how blocks are scaled."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron_lowbit.numerics.formats import E4M3, ElementFormat, decode, encode

Encoded = tuple[Tensor, Tensor, Tensor]
"""Codes (R, K), ``element.dtype`` or uint8, one per byte; scales, rows (or rows of blocks) first,
then blocks along K; tensor scale, an FP32 scalar, or (R, 1) where ``scales_tensor_rows``."""


@dataclass(frozen=True)
class BlockFormat(ABC):
    """A format; formats that differ in an option are different.

    Of ``element`` the rest of the package needs the name and the number of bits only.
    ``block_rows`` x ``block`` elements share a scale, blocks running along the last axis. A format
    that is ``tensor_scaled`` also has one scale for the tensor, made from the tensor's amax; one
    that is ``row_scaled`` has a scale for each row in place of the tensor's, or of the blocks':
    ``block`` is then 1.
    ``scale_bits`` is the width of a block scale. ``OPTIONS`` names the fields that a recipe may
    set, with their values, the default first.

    ``scale_dtype`` is the dtype of stored scales; square blocks repeat theirs for each row if
    ``repeats_scales``. Operands that are ``exact_in_bf16``, an element times its block scale being
    a BF16 number, are multiplied by BF16 tensor cores, others in FP32, where no faster route takes
    them (``kernels/routes.py``). A format ``folds`` if a code times its block's scale is an FP8
    number, as in ``folding.py``. ``draws`` are the random numbers that stochastic rounding takes
    for an element.
    """

    name: str
    element: ElementFormat
    block_rows: int

    block: ClassVar[int]
    tensor_scaled: ClassVar[bool] = False
    row_scaled: ClassVar[bool] = False
    scale_bits: ClassVar[int]
    OPTIONS: ClassVar[dict[str, tuple[Any, ...]]] = {}
    scale_dtype: ClassVar[torch.dtype] = torch.uint8
    repeats_scales: ClassVar[bool] = True
    exact_in_bf16: ClassVar[bool] = False
    folds: ClassVar[bool] = False
    draws: ClassVar[int] = 1

    @abstractmethod
    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        """Quantize whole blocks.

        Args:
            x: FP32 (R, K), contiguous, R a multiple of ``block_rows`` and K of ``block``.
            amax: FP32 scalar that the tensor scale is made from; unused without one.
            uniform: FP32 (R, K) in (0, 1) for stochastic rounding, or (draws, R, K) where the
                format takes several; None rounds to nearest-even.
        """

    def decode(self, codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode what :meth:`encode` returns to FP32, (R, K) once flattened from axis 1 on.

        Rows after the last one of interest may have been cut off codes and scales.
        """
        if self.block == 1:
            return decode(codes, self.element) * (scales if self.row_scaled else tensor_scale)
        if not self.repeats_scales:
            scales = scales.repeat_interleave(self.block_rows, dim=0)[: codes.shape[0]]
        shape = codes.shape[-1] // self.block, self.block
        values = decode(codes.unflatten(-1, shape), self.element)
        return values * self.decode_scales(scales).unsqueeze(-1) * tensor_scale.view(-1, 1, 1)

    def decode_scales(self, scales: Tensor) -> Tensor:
        """Decode stored block scales to FP32."""
        return scales.to(torch.float32)

    def transpose_scales(self, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the scales of the transpose, for square blocks.

        ``shape`` is the logical (R, K) before. A format that keeps scales otherwise overrides it.
        """
        if not self.repeats_scales:
            return scales.t()
        if self.block == 1:
            return scales.new_empty((shape[1], 0))
        compact = scales[:: self.block_rows].t()
        return compact.repeat_interleave(self.block_rows, dim=0)[: shape[1]]

    @property
    def square(self) -> bool:
        """True if the transpose of a quantized tensor is the quantized transpose."""
        return self.block_rows == self.block and not self.row_scaled

    @property
    def scales_tensor_rows(self) -> bool:
        """True if each row has a tensor scale of its own, above its blocks' scales."""
        return self.row_scaled and self.block > 1

    @property
    def bits_per_element(self) -> float:
        """Bits per element that a tensor core reads: its own and its share of the block scale."""
        rows = 1 if self.repeats_scales else self.block_rows
        return self.element.bits + self.scale_bits / (rows * self.block)

    @property
    def random_bits(self) -> int:
        """Random bits of each number that stochastic rounding takes: 8 or 16."""
        return self.element.random_bits

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the stored scales of (rows, columns), whole blocks along columns."""
        if self.block == 1:
            return rows, int(self.row_scaled)
        return rows if self.repeats_scales else -(-rows // self.block_rows), columns // self.block

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not at their default."""
        values = {name: getattr(self, name) for name in self.OPTIONS}
        return {name: v for name, v in values.items() if v != self.OPTIONS[name][0]}

    def with_options(self, **options: Any) -> Self:
        """Return the same format with some options changed; square blocks stay square.

        Raises:
            ValueError: no such option or value; the message says which there are.
        """
        for name, value in options.items():
            if name not in self.OPTIONS:
                good = f"use {', '.join(self.OPTIONS)}" if self.OPTIONS else "it has none"
                raise ValueError(f"format {self.name} has no option {name!r}; {good}")
            allowed = self.OPTIONS[name]
            if not any(value == good and type(value) is type(good) for good in allowed):
                listed = ", ".join(str(good).lower() for good in allowed)
                raise ValueError(
                    f"{name}: {value!r} with format {self.name} is not one of {listed}"
                )
        changed = replace(self, **options)
        square = self.block_rows == self.block
        return replace(changed, block_rows=changed.block) if square else changed

    def __str__(self) -> str:
        shown = [self.name]
        for name, value in self.options.items():
            named = not isinstance(value, str) or self.OPTIONS[name][0] == "none"
            shown.append(name if value is True else f"{name} {value}" if named else value)
        return " ".join(shown)


def blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """View (R, K) as (R/rows, rows, K/columns, columns)."""
    return x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def finite_amax(amax: Tensor) -> Tensor:
    """Return amaxes with NaN in place of infinity, so that what they scale becomes NaN.

    A cast saturates: with a finite scale an infinity would turn into an ordinary number, and no
    check of the loss or of gradients could see it.
    """
    return torch.where(amax.isfinite(), amax, torch.nan)


def block_amax(tiles: Tensor) -> Tensor:
    """Return the largest magnitude of each of the :func:`blocks`, (R/rows, 1, K/columns, 1).

    It is NaN for a block with an infinity or a NaN.
    """
    return finite_amax(tiles.abs().amax(dim=-1, keepdim=True).amax(dim=1, keepdim=True))


def row_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row of (R, K), (R, 1), as :func:`finite_amax` does."""
    # Rows without columns have no largest magnitude: a gradient of no tokens, transposed.
    return finite_amax(x.abs().amax(-1, keepdim=True) if x.shape[1] else x.new_zeros((len(x), 1)))


def for_each_row(scales: Tensor, rows: int) -> Tensor:
    """Repeat scales of :func:`blocks`, (R/rows, 1, K/columns, 1), for each row: (R, K/columns)."""
    return scales.squeeze(-1).expand(-1, rows, -1).flatten(0, 1)


def constant(value: float, like: Tensor) -> Tensor:
    """Return an FP32 scalar on the device of ``like``."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


_FLT_MAX = torch.finfo(torch.float32).max


def encode_scale(amax: Tensor, top: float) -> Tensor:
    """Return min(top / amax, FLT_MAX), which brings a tensor's amax to ``top``; 1 for zeros."""
    # A tensor over a tensor: torch turns number / tensor into number * (1 / tensor).
    scale = (torch.full_like(amax, top) / amax).clamp(max=_FLT_MAX)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def multiplier(scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """Return the factor of elements: min(1 / (scale * tensor scale), FLT_MAX)."""
    return (1.0 / (scales.to(torch.float32) * tensor_scale)).clamp(max=_FLT_MAX)


def decode_scale(amax: Tensor, scale: float, element: float) -> Tensor:
    """Return amax / scale / element, at least FP32's smallest number; 1 for zeros."""
    quotient = amax / torch.full_like(amax, scale) / torch.full_like(amax, element)
    return torch.where(amax == 0, torch.ones_like(amax), quotient.clamp(2.0**-149))


def positive_scales(base: Tensor, tensor_scale: Tensor) -> Tensor:
    """Return E4M3 numbers next to base / tensor_scale, in FP32; 1 in place of 0."""
    scales = encode(base / tensor_scale, E4M3).to(torch.float32)
    return torch.where(scales == 0, torch.ones_like(scales), scales)
