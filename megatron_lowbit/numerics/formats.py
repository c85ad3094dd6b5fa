"""Element and scale formats: their grids, rounding, codes and packing.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3, for E2M1, E2M3, E3M2 and E8M0; the OFP8
specification for E4M3 and E5M2. Every cast saturates: a magnitude beyond the largest finite value
becomes that value. Everything here is elementwise FP32 arithmetic that rounds only where it says
so, so any engine that follows it operation by operation produces the same bits.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Rounding(Enum):
    """How a value between two neighbours ``lo <= |x| < hi`` of a grid is rounded."""

    NEAREST_EVEN = "nearest"
    """To the closer one; at the midpoint to the one with the even code."""

    STOCHASTIC = "stochastic"
    """Up with probability ``(|x| - lo) / (hi - lo)``; a value on the grid never moves."""


@dataclass(frozen=True)
class ElementFormat:
    """A small floating-point format: 1 sign bit, ``exponent_bits``, ``mantissa_bits``.

    ``max`` is the largest finite magnitude and ``min_normal`` the smallest normal one. Subnormals
    are multiples of ``min_normal * 2**-mantissa_bits``.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def binade_edges(self) -> tuple[float, ...]:
        """The powers of two from which on the grid step is twice as wide."""
        edges = [self.min_normal * 2.0]
        while edges[-1] * 2.0 <= self.max:
            edges.append(edges[-1] * 2.0)
        return tuple(edges)


E2M1 = ElementFormat("e2m1", 2, 1, 6.0, 1.0)
E2M3 = ElementFormat("e2m3", 2, 3, 7.5, 1.0)
E3M2 = ElementFormat("e3m2", 3, 2, 28.0, 2.0**-2)
E4M3 = ElementFormat("e4m3", 4, 3, 448.0, 2.0**-6)
E5M2 = ElementFormat("e5m2", 5, 2, 57344.0, 2.0**-14)


def round_to_grid(
    x: Tensor, format: ElementFormat, rounding: Rounding, uniform: Tensor | None = None
) -> Tensor:
    """Round to the nearest or a random neighbouring value of ``format``, saturating.

    Args:
        x: FP32, any shape. NaN stays NaN.
        format: the grid.
        rounding: the rule between two grid values.
        uniform: FP32 in [0, 1), the shape of ``x``; needed by stochastic rounding only. The
            magnitude is rounded up where ``uniform`` is below the fraction of the interval passed.

    Returns:
        FP32 grid values with the sign of ``x`` (a negative value that rounds to zero gives -0).
    """
    magnitude = x.abs().clamp(max=format.max)
    # Comparisons instead of a logarithm (which rounds) or a bit cast (which CPUs do not vectorize).
    ulp = 2.0**-format.mantissa_bits
    step = torch.full_like(magnitude, format.min_normal * ulp)
    inverse = torch.full_like(magnitude, 1.0 / (format.min_normal * ulp))
    for edge in format.binade_edges:
        step = torch.where(magnitude >= edge, edge * ulp, step)
        inverse = torch.where(magnitude >= edge, 1.0 / (edge * ulp), inverse)
    multiple = magnitude * inverse  # exact: both are powers of two
    if rounding is Rounding.STOCHASTIC:
        if uniform is None:
            raise ValueError("stochastic rounding needs uniform random numbers")
        floor = multiple.floor()
        multiple = floor + (uniform < multiple - floor).to(torch.float32)
    else:
        multiple = multiple.round()  # half to even; the multiple and the code share their parity
    return torch.copysign(multiple * step, x)


def encode_e2m1(grid_values: Tensor) -> Tensor:
    """FP32 values on the E2M1 grid to uint8 codes 0..15, sign in bit 3."""
    magnitude = grid_values.abs()
    code = torch.where(
        magnitude < 2.0,
        magnitude * 2.0,
        torch.where(magnitude < 4.0, magnitude + 2.0, magnitude * 0.5 + 4.0),
    )
    # 1 / -0 is -inf: the sign of a zero counts, and a comparison is cheaper than a sign bit.
    return torch.where(1.0 / grid_values < 0.0, code + 8.0, code).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 to FP32 values."""
    code = codes.to(torch.float32)
    negative = code >= 8.0
    code = torch.where(negative, code - 8.0, code)
    magnitude = torch.where(
        code < 4.0, code * 0.5, torch.where(code < 6.0, code - 2.0, code * 2.0 - 8.0)
    )
    return torch.where(negative, -magnitude, magnitude)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 (..., K), K even, to bytes (..., K/2): even element in the low nibble."""
    pairs = codes.flatten().view(torch.int16)  # even code in the low byte, odd in the high one
    packed = (pairs | (pairs >> 4)).to(torch.uint8)
    return packed.view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_nibbles`: (..., K/2) bytes to (..., K) codes 0..15."""
    pairs = packed.flatten().to(torch.int16)
    codes = ((pairs & 0x0F) | ((pairs & 0xF0) << 4)).view(torch.uint8)
    return codes.view(*packed.shape[:-1], packed.shape[-1] * 2)


def cast_e4m3(x: Tensor) -> Tensor:
    """FP32 to ``torch.float8_e4m3fn``, nearest-even, saturating at 448; NaN stays NaN."""
    return x.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


E8M0_BIAS = 127
E8M0_NAN = 255


def encode_e8m0(exponent: Tensor) -> Tensor:
    """Integer exponents, clamped to [-127, 127], to E8M0 bytes: exponent + 127."""
    return (exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)


def decode_e8m0(scales: Tensor) -> Tensor:
    """E8M0 bytes to FP32 powers of two; byte 255 is NaN. 2**-127 is an FP32 subnormal."""
    value = torch.ldexp(
        torch.ones_like(scales, dtype=torch.float32), scales.to(torch.int32) - E8M0_BIAS
    )
    return value.masked_fill(scales == E8M0_NAN, torch.nan)
