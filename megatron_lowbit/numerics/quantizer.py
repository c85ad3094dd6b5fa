"""Quantizers and quantized tensors: the types that every layer above speaks in."""

from dataclasses import dataclass
from difflib import get_close_matches

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.numerics import nvfp4
from megatron_lowbit.numerics.formats import Rounding
from megatron_lowbit.numerics.hadamard import Hadamard, hadamard_transform
from megatron_lowbit.numerics.nvfp4 import NVFP4
from megatron_lowbit.numerics.philox import Draw, uniform

Format = NVFP4

FORMATS: dict[str, Format] = {**nvfp4.FORMATS}
"""Every block-scaled format by name."""


def format_by_name(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: no such format; the message lists near names, or all.
    """
    if name not in FORMATS:
        near = get_close_matches(name, FORMATS) or list(FORMATS)
        raise ValueError(f"unknown format {name!r}; did you mean {', '.join(near)}?")
    return FORMATS[name]


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in a block-scaled format, block axis last.

    ``codes``, ``scales`` and ``tensor_scale`` are as the format defines them, for the rows of
    ``shape`` flattened to two dimensions and its last axis padded to whole blocks; ``shape`` is
    the logical shape.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    format: Format
    shape: tuple[int, ...]

    def dequantize(self) -> Tensor:
        """The FP32 values, of ``shape``."""
        values = self.format.dequantize(self.codes, self.scales, self.tensor_scale)
        return values[:, : self.shape[-1]].reshape(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return self.codes.nbytes + self.scales.nbytes + self.tensor_scale.nbytes


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
    """A format and a rounding of its elements (scales are always rounded as the format says)."""

    format: Format
    rounding: Rounding = Rounding.NEAREST_EVEN

    def amax(self, x: Tensor, hadamard: Hadamard | None = None) -> Tensor:
        """The tensor amax (FP32 scalar) of x (R, K) as quantized: after the transform, if any."""
        return self.format.amax(x if hadamard is None else hadamard_transform(x, hadamard))

    def __call__(
        self,
        x: Tensor,
        *,
        hadamard: Hadamard | None = None,
        amax: Tensor | None = None,
        draw: Draw | None = None,
    ) -> QuantizedTensor:
        """Quantize x (..., K) with blocks along its last axis, by the reference arithmetic.

        Args:
            x: FP32 or BF16. Ragged sizes are padded with zeros inside.
            hadamard: transform applied along the last axis first.
            amax: FP32 scalar to take the tensor scale from instead of x's own, for a scale that
                is shared by the shards of one tensor.
            draw: the random bits; needed by stochastic rounding.
        """
        x2d = x.reshape(-1, x.shape[-1])
        if amax is None:
            amax = self.amax(x2d, hadamard)
        key, rows, quads = self.random_inputs(x2d, draw)
        arrays = quantize_arrays(x2d, self, hadamard, amax, key, rows, quads)
        return QuantizedTensor(*arrays, self.format, tuple(x.shape))

    def random_inputs(
        self, x: Tensor, draw: Draw | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Key words, row and quad numbers of x (R, K) as tensors; all None for nearest rounding."""
        if self.rounding is not Rounding.STOCHASTIC:
            return None, None, None
        if draw is None:
            raise ValueError("stochastic rounding needs a Draw: which random bits to use")
        return draw.key_words(x.device), *draw.counters(*x.shape, x.device)


def quantize_arrays(
    x: Tensor,
    quantizer: Quantizer,
    hadamard: Hadamard | None,
    amax: Tensor,
    key: Tensor | None,
    rows: Tensor | None,
    quads: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole of quantization as one function of tensors: what an engine fuses.

    Args:
        x: (R, K), FP32 or BF16, any strides.
        amax: FP32 scalar.
        key, rows, quads: as :meth:`Quantizer.random_inputs` gives them.

    Returns:
        (codes, scales, tensor_scale) of R rows, the last axis padded to whole blocks.
    """
    format, count = quantizer.format, x.shape[0]
    y = x.to(torch.float32) if hadamard is None else hadamard_transform(x, hadamard)
    y = F.pad(y, (0, -y.shape[1] % format.block, 0, -count % format.block_rows))
    random = None
    if key is not None:
        random = uniform(key, rows, quads)
        random = F.pad(random, (0, y.shape[1] - random.shape[1], 0, y.shape[0] - count))
    codes, scales, tensor_scale = format.quantize(y, quantizer.rounding, amax, random)
    return codes[:count], scales[:count], tensor_scale


def quantize(
    x: Tensor,
    format: str,
    *,
    axis: int = -1,
    rounding: str = "nearest",
    hadamard: int | None = None,
    generator: torch.Generator | None = None,
) -> QuantizedTensor:
    """Quantize a tensor.

    Args:
        x: FP32 or BF16, at least one axis.
        format: a format's name, such as ``nvfp4`` (blocks 1x16) or ``nvfp4-2d`` (16x16).
        axis: the axis that blocks run along. It becomes the last axis of the result: ``axis=0``
            of a matrix quantizes its transpose.
        rounding: ``nearest`` or ``stochastic``.
        hadamard: size of a random Hadamard transform with the fixed signs along the block axis,
            before quantization.
        generator: seeds the key of stochastic rounding; None takes torch's default CPU generator.

    Raises:
        ValueError: unknown format or rounding, a bad Hadamard size, or x without axes.
        TypeError: x is neither FP32 nor BF16.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"quantize takes float32 or bfloat16, not {x.dtype}")
    if x.ndim == 0:
        raise ValueError("quantize needs a tensor with at least one axis")
    choices = [member.value for member in Rounding]
    if rounding not in choices:
        raise ValueError(f"unknown rounding {rounding!r}; use one of {', '.join(choices)}")
    quantizer = Quantizer(format_by_name(format), Rounding(rounding))
    draw = None
    if quantizer.rounding is Rounding.STOCHASTIC:
        draw = Draw(int(torch.randint(2**63 - 1, (), generator=generator)))
    transform = None if hadamard is None else Hadamard(hadamard)
    return quantizer(x.movedim(axis, -1), hadamard=transform, draw=draw)
