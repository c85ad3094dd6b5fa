"""Element and scale formats: their grids, rounding, codes and packing.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3, for E2M1, E2M3, E3M2 and E8M0; the OFP8
specification for E4M3 and E5M2. Every cast saturates: a magnitude beyond the largest finite value
becomes that value. Everything here is elementwise FP32 arithmetic that rounds only where it says
so, so any engine that follows it operation by operation produces the same bits.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ElementFormat:
    """A small floating-point format: 1 sign bit, ``exponent_bits``, ``mantissa_bits``.

    ``max`` is the largest finite magnitude and ``min_normal`` the smallest normal one. Subnormals
    are multiples of ``min_normal * 2**-mantissa_bits``. ``dtype`` is a torch dtype whose cast gives
    the codes, or None where torch has none: then codes are uint8, one per byte.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def random_bits(self) -> int:
        """Random bits of an element's stochastic rounding: 8 for 4-bit elements, else 16."""
        return 8 if self.bits == 4 else 16

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest magnitude: emax of the MX specification."""
        return math.frexp(self.max)[1] - 1

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
E4M3 = ElementFormat("e4m3", 4, 3, 448.0, 2.0**-6, torch.float8_e4m3fn)
E5M2 = ElementFormat("e5m2", 5, 2, 57344.0, 2.0**-14, torch.float8_e5m2)

TIES_AWAY = 0.5 - 2.0**-25
"""As the random number of every element: round to nearest, halves away from zero."""


def round_to_grid(x: Tensor, format: ElementFormat, uniform: Tensor | None = None) -> Tensor:
    """Round to the nearest or a random neighbouring value of ``format``, saturating.

    Args:
        x: FP32, any shape. NaN stays NaN.
        format: the grid.
        uniform: FP32 in [0, 1), the shape of ``x``, for stochastic rounding: the magnitude is
            rounded up where ``uniform`` is below the fraction of the interval passed. None rounds
            to nearest-even.

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
    if uniform is None:
        multiple = multiple.round()  # half to even; the multiple and the code share their parity
    else:
        floor = multiple.floor()
        multiple = floor + (uniform < multiple - floor).to(torch.float32)
    return torch.copysign(multiple * step, x)


def encode(x: Tensor, format: ElementFormat, uniform: Tensor | None = None) -> Tensor:
    """Round to ``format`` and give the codes, saturating.

    Args:
        x: FP32, any shape.
        format, uniform: as :func:`round_to_grid` takes them.

    Returns:
        Codes of ``format.dtype``, or uint8 with the sign in the top bit of the format's width. NaN
        stays NaN where the format has one; the others give code 0, and their scale says NaN.
    """
    if format.dtype is None:
        return grid_to_codes(round_to_grid(x, format, uniform), format)
    if uniform is not None:
        x = round_to_grid(x, format, uniform)
    return x.clamp(-format.max, format.max).to(format.dtype)


def decode(codes: Tensor, format: ElementFormat) -> Tensor:
    """Decode the codes of :func:`encode` to FP32 values."""
    code = codes.to(torch.float32)
    if format.dtype is not None:
        return code
    sign, steps = 2.0 ** (format.bits - 1), 2.0**format.mantissa_bits
    negative = code >= sign
    code = torch.where(negative, code - sign, code)
    magnitude = code * (format.min_normal / steps)
    for number, edge in enumerate(format.binade_edges, start=1):
        magnitude = torch.where(
            code >= (number + 1) * steps, (code - number * steps) * (edge / steps), magnitude
        )
    return torch.where(negative, -magnitude, magnitude)


def grid_to_codes(grid_values: Tensor, format: ElementFormat) -> Tensor:
    """Encode FP32 values on the grid as uint8, sign in the top bit; NaN becomes 0."""
    magnitude = grid_values.abs()
    # Codes are linear in the value within a binade; below the first edge they count subnormals.
    steps = 2.0**format.mantissa_bits
    code = magnitude * (steps / format.min_normal)
    for number, edge in enumerate(format.binade_edges, start=1):
        code = torch.where(magnitude >= edge, magnitude * (steps / edge) + number * steps, code)
    # 1 / -0 is -inf: the sign of a zero counts, and a comparison is cheaper than a sign bit.
    code = torch.where(1.0 / grid_values < 0.0, code + 2.0 ** (format.bits - 1), code)
    return torch.where(grid_values.isnan(), 0.0, code).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes 0..15 (..., K), K even, into bytes (..., K/2): even element in the low nibble."""
    pairs = codes.flatten().view(torch.int16)  # even code in the low byte, odd in the high one
    packed = (pairs | (pairs >> 4)).to(torch.uint8)
    return packed.view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack the bytes (..., K/2) of :func:`pack_nibbles` to codes 0..15 (..., K)."""
    pairs = packed.flatten().to(torch.int16)
    codes = ((pairs & 0x0F) | ((pairs & 0xF0) << 4)).view(torch.uint8)
    return codes.view(*packed.shape[:-1], packed.shape[-1] * 2)


E8M0_BIAS = 127
E8M0_NAN = 255


def decode_e8m0(scales: Tensor) -> Tensor:
    """Decode E8M0 bytes (uint8) to FP32; 255 is NaN. 2**-127 is an FP32 subnormal."""
    byte = scales.to(torch.int32)
    # The byte is FP32's own exponent field, but for 2**-127, which only a subnormal can hold.
    value = torch.where(byte == 0, 1 << 22, byte << 23).view(torch.float32)
    return value.masked_fill(byte == E8M0_NAN, torch.nan)


def reciprocal_e8m0(scales: Tensor) -> Tensor:
    """Decode E8M0 bytes (uint8) to the FP32 reciprocals of their values; exact."""
    opposite = 2 * E8M0_BIAS - scales.to(torch.int32)  # the byte of the negated exponent
    return decode_e8m0(torch.where(scales == E8M0_NAN, E8M0_NAN, opposite))
