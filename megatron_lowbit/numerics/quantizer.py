"""Quantizers and quantized tensors: the types that every layer above speaks in."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats import FORMATS
from megatron_lowbit.numerics.delayed_scaling import DelayedAmax
from megatron_lowbit.numerics.formats import ElementFormat, pack_nibbles, unpack_nibbles
from megatron_lowbit.numerics.hadamard import Hadamard, hadamard_transform
from megatron_lowbit.numerics.mean_residual import split_mean
from megatron_lowbit.numerics.randomness import Draw, uniform


class Rounding(Enum):
    """Rounding of a value between two neighbours ``lo <= |x| < hi`` of a grid."""

    NEAREST_EVEN = "nearest"
    """To the closer one; at the midpoint to the one with the even code."""

    STOCHASTIC = "stochastic"
    """Up with probability ``(|x| - lo) / (hi - lo)``; a value on the grid never moves."""


class Arithmetic(NamedTuple):
    """The elementwise work of quantization, for an engine to replace by fused equals.

    ``encode`` and ``decode`` take a format and then the arguments of its methods of that name;
    ``uniform`` is :func:`megatron_lowbit.numerics.randomness.uniform`.
    """

    encode: Callable[..., tuple[Tensor, Tensor, Tensor]]
    decode: Callable[..., Tensor]
    uniform: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


REFERENCE = Arithmetic(
    encode=lambda format, *arguments: format.encode(*arguments),
    decode=lambda format, *arguments: format.decode(*arguments),
    uniform=uniform,
)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in a block-scaled format, block axis last.

    ``codes`` (4-bit ones two per byte), ``scales`` and ``tensor_scale`` are as the format defines
    them, for ``shape`` flattened to two axes and its last one padded to whole blocks; ``shape`` is
    the logical shape, its last axis rounded up to whole transforms where one was applied. ``mean``,
    FP32 (K,), is added to each decoded row of K, where the mean of the rows was split off.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    format: BlockFormat
    shape: tuple[int, ...]
    mean: Tensor | None = None

    def __repr__(self) -> str:
        shown = [f"{self.format}, shape={tuple(self.shape)}, device={self.codes.device}"]
        for name in ("codes", "scales", "mean"):
            if (x := getattr(self, name)) is not None:
                shown.append(f"{name}={str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}")
        return f"QuantizedTensor({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts that pickle, copy.deepcopy and torch.save restore.

        ``torch.load`` takes it with ``weights_only``, once this package is imported.
        """
        # As bytes: pickle cannot load FP8 tensors of torch 2.13, which only torch.save can.
        stored = [(as_bytes(x), x.dtype) for x in (self.codes, self.scales)]
        return _restored, (*stored, self.tensor_scale, self.format, self.shape, self.mean)

    def dequantize(self, arithmetic: Arithmetic = REFERENCE) -> Tensor:
        """Return the FP32 values, of ``shape``."""
        codes = unpack_nibbles(self.codes) if self.format.element.bits == 4 else self.codes
        values = arithmetic.decode(self.format, codes, self.scales, self.tensor_scale).flatten(1)
        values = values[:, : self.shape[-1]].reshape(self.shape)
        return values if self.mean is None else values + self.mean

    def transpose(self) -> "QuantizedTensor":
        """Return the transpose (K, R) of a matrix (R, K) in square blocks, with the same bits."""
        if not self.format.square:
            raise ValueError(f"{self.format.name} has no square blocks: quantize the transpose")
        if self.mean is not None:
            raise ValueError("the transpose has no mean of its rows: quantize it without")
        rows, columns = self.shape
        four_bits = self.format.element.bits == 4
        codes = unpack_nibbles(self.codes) if four_bits else self.codes.view(torch.uint8)
        codes = _pad(codes[:, :columns].t(), columns, _round_up(rows, self.format.block))
        codes = codes.contiguous()
        codes = pack_nibbles(codes) if four_bits else codes.view(self.codes.dtype)
        scales = self.format.transpose_scales(self.scales, (rows, columns))
        return QuantizedTensor(codes, scales, self.tensor_scale, self.format, (columns, rows))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and mean together."""
        mean = 0 if self.mean is None else self.mean.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.tensor_scale.nbytes + mean


def as_bytes(x: Tensor) -> Tensor:
    """Return codes or scales in a dtype that pickles and collectives take."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _restored(
    codes: tuple[Tensor, torch.dtype],
    scales: tuple[Tensor, torch.dtype],
    tensor_scale: Tensor,
    format: BlockFormat,
    shape: tuple[int, ...],
    mean: Tensor | None = None,
) -> QuantizedTensor:
    """Return the quantized tensor that was pickled; codes and scales come with their dtypes."""
    codes_of_format, scales_of_format = (x.view(dtype) for x, dtype in (codes, scales))
    return QuantizedTensor(codes_of_format, scales_of_format, tensor_scale, format, shape, mean)


torch.serialization.add_safe_globals(
    [_restored, ElementFormat, *{type(format) for format in FORMATS.values()}]
)


@dataclass(frozen=True)
class Operand:
    """One tensor quantized for two GEMMs.

    ``row`` has its blocks along the last axis of ``source`` (R, K), ``col`` along its rows, as the
    quantized transpose (K, R), always from the high-precision source and never from row's codes.
    Either is None where its GEMM runs in high precision or has no need of it.
    """

    row: QuantizedTensor | None
    col: QuantizedTensor | None
    source: Tensor


@dataclass(frozen=True)
class Quantizer:
    """A format and a rounding of its elements (scales are always rounded as the format says).

    ``splits_mean`` quantizes the residual from the mean of the rows (``mean_residual.py``).
    """

    format: BlockFormat
    rounding: Rounding = Rounding.NEAREST_EVEN
    splits_mean: bool = False

    @property
    def rows_are_independent(self) -> bool:
        """True if a row has only codes and block scales, which depend on that row alone."""
        format = self.format
        has_tensor_scale = format.tensor_scaled or format.scales_tensor_rows
        shared = has_tensor_scale or format.block_rows > 1 or self.splits_mean
        return not (shared or self.rounding is Rounding.STOCHASTIC)

    def __call__(
        self, x: Tensor, amax: Tensor | DelayedAmax | None = None, **options: Any
    ) -> QuantizedTensor:
        """Quantize x (..., K) along its last axis, with the options of :class:`Request`."""
        return Request(self, **options).quantize(x, amax)


@dataclass(frozen=True, eq=False)
class Request:
    """Quantization of one side of a tensor in one call: a quantizer, and what the call adds.

    Compared by identity, so that plans of kernels are found by :attr:`keyless` at once.

    Args:
        quantizer: format and rounding.
        hadamard: transform applied along the last axis first.
        sign_key: key of the transform's signs, where they are fresh for each GEMM.
        draw: the random bits; needed by stochastic rounding.
        partner: format of the operand that it will be multiplied with; None for high precision.
        transpose_partner: partner of its transpose, for square blocks that serve both sides.
        left: True for the left operand of its product.
        needs_codes: True for an operand whose codes are sent or dequantized. Any other an engine
            may give in the form that its GEMM takes.
        saved: True for an operand that is kept in memory: its form takes no more than codes do.
        folding: False if the engine must not fold it (``folding.py``).
    """

    quantizer: Quantizer
    hadamard: Hadamard | None = None
    sign_key: int | Tensor = 0
    draw: Draw | None = None
    partner: BlockFormat | None = None
    transpose_partner: BlockFormat | None = None
    left: bool = False
    needs_codes: bool = False
    saved: bool = False
    folding: bool = True

    @cached_property
    def keyless(self) -> "Request":
        """The request without its call's keys: one object for all that ask for the same."""
        bare = replace(self, sign_key=0, draw=None)
        asked = tuple(getattr(bare, field.name) for field in fields(bare))
        keyless = _KEYLESS.setdefault(asked, bare)
        keyless.__dict__["keyless"] = keyless
        return keyless

    @cached_property
    def of_transpose(self) -> "Request":
        """The request for the transpose in square blocks, for its own partner."""
        return replace(self, partner=self.transpose_partner)

    @cached_property
    def takes_keys(self) -> bool:
        """True if each call has keys of its own, for random bits or for fresh signs."""
        fresh = self.hadamard is not None and self.hadamard.signs == "fresh"
        return fresh or self.quantizer.rounding is Rounding.STOCHASTIC

    @cached_property
    def takes_tensor_amax(self) -> bool:
        """True if the amax of the tensor as it is can serve: for its scale, or for folding."""
        format = self.quantizer.format
        transformed = format.tensor_scaled and self.hadamard is not None
        return not (format.row_scaled or transformed or self.quantizer.splits_mean)

    def with_keys(self, sign_key: int | Tensor, draw: Draw | None) -> "Request":
        """Return the request with a call's keys."""
        keyed = replace(self, sign_key=sign_key, draw=draw)
        keyed.__dict__["keyless"] = self.keyless
        return keyed

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return x (R, K) in FP32, transformed or as a residual if the request says so.

        The second result is the mean of rows that a residual lacks, else None.
        """
        if self.quantizer.splits_mean:
            mean, residual = split_mean(x.float())
            return residual, mean
        if self.hadamard is None:
            return x.float(), None
        return hadamard_transform(x, self.hadamard, self.sign_key), None

    def amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude of what is encoded of x (R, K), an FP32 scalar."""
        y, _ = self.prepare(x)
        return y.abs().amax() if y.numel() else y.new_zeros(())

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | DelayedAmax | None = None,
        arithmetic: Arithmetic = REFERENCE,
    ) -> QuantizedTensor:
        """Quantize x with blocks along its last axis.

        Args:
            x: (..., K), FP32 or BF16, any strides. Ragged sizes are padded with zeros inside.
            amax: FP32 scalar that a tensor scale is made from, such as the maximum over the shards
                of a tensor, or an amax of earlier steps, which records the amax of x after the
                transform. None takes the amax of x. No effect without a tensor scale.
            arithmetic: the engine's elementwise functions, equal to the reference bit for bit.
        """
        format, count = self.quantizer.format, math.prod(x.shape[:-1])
        x2d = x.reshape(count, x.shape[-1])
        y, mean = self.prepare(x2d)
        if not isinstance(amax, Tensor) or not format.tensor_scaled:
            current = y.abs().amax() if format.tensor_scaled and y.numel() else y.new_zeros(())
            amax = amax.resolve(current) if isinstance(amax, DelayedAmax) else current
        # A transform spreads a ragged last block over all of its points: none may be cut off.
        columns = y.shape[1]
        y = _pad(y, _round_up(count, format.block_rows), _round_up(columns, format.block))
        random = None
        if self.quantizer.rounding is Rounding.STOCHASTIC:
            if self.draw is None:
                raise ValueError("stochastic rounding needs a Draw: which random bits to use")
            key = self.draw.key_words(x.device)
            rows, groups = self.draw.counters(count, columns, x.device)
            numbers = [
                _pad(u[:, : y.shape[1]], *y.shape)
                for u in (
                    arithmetic.uniform(key, rows, groups, format.random_bits, number)
                    for number in range(format.draws)
                )
            ]
            random = numbers[0] if len(numbers) == 1 else torch.stack(numbers)
        codes, scales, tensor_scale = arithmetic.encode(format, y.contiguous(), amax, random)
        codes = pack_nibbles(codes) if format.element.bits == 4 else codes
        shape = (*x.shape[:-1], columns)
        return QuantizedTensor(codes[:count], scales[:count], tensor_scale, format, shape, mean)


_KEYLESS: dict[tuple[Any, ...], Request] = {}
"""Every request without keys so far, by its fields."""


@dataclass(frozen=True)
class Requests:
    """Requests for similar matrices, one for each, which differ only in their keys.

    Args:
        template: one of them.
        draw_keys: of their random bits; empty where none are drawn.
        sign_keys: of their transforms' signs; empty where they are not fresh.
    """

    template: Request
    draw_keys: Sequence[int | Tensor] = ()
    sign_keys: Sequence[int | Tensor] = ()

    def __getitem__(self, number: int) -> Request:
        """Return the request for one of the matrices."""
        request = self.template
        if self.draw_keys and request.draw is not None:
            request = replace(request, draw=replace(request.draw, key=self.draw_keys[number]))
        return replace(request, sign_key=self.sign_keys[number]) if self.sign_keys else request


Amaxes = tuple[Tensor | None, Tensor | None]
"""Tensor amaxes of a matrix and of its transpose; None for a side that needs none."""
ScaleAmaxes = tuple[Tensor | DelayedAmax | None, Tensor | DelayedAmax | None]
"""Amaxes that tensor scales of a matrix and of its transpose are made from; None for its own."""


def tensor_amaxes(x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
    """Return the amaxes of x (R, C) as ``row`` transforms it, and of its transpose as ``col`` does.

    They are FP32 scalars, None for a side that is not wanted or whose format has no tensor scale.
    """
    row_amax = row.amax(x) if row and row.quantizer.format.tensor_scaled else None
    if col is row:
        return row_amax, row_amax
    return row_amax, col.amax(x.t()) if col and col.quantizer.format.tensor_scaled else None


def quantize_both(
    x: Tensor,
    row: Request | None,
    col: Request | None,
    amaxes: ScaleAmaxes = (None, None),
    arithmetic: Arithmetic = REFERENCE,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Quantize x (R, C) as ``row`` says, and its transpose as ``col`` says; None for None.

    ``col`` may be ``row`` itself, of square blocks: the transpose then takes row's very bits.
    """
    by_row = None if row is None else row.quantize(x, amaxes[0], arithmetic)
    if col is None:
        return by_row, None
    if by_row is not None and col is row:
        return by_row, by_row.transpose()
    return by_row, col.quantize(x.t(), amaxes[1], arithmetic)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad x with zeros up to the given size."""
    bottom, right = rows - x.shape[0], columns - x.shape[1]
    return F.pad(x, (0, right, 0, bottom)) if bottom or right else x


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
