"""NVFP4: E2M1 elements, one E4M3 scale per block of 16, one FP32 scale per tensor.

Source: "Pretraining Large Language Models with NVFP4", appendix B, in the operation order of
Transformer Engine's kernels. All scale arithmetic is FP32:

    S_enc = min(448 * 6 / amax_tensor, FLT_MAX);  1 where amax_tensor is 0
    s_b   = e4m3(min(amax_block * (S_enc * fp32(1/6)), 448))
    enc_b = min(1 / (fp32(s_b) * (1 / S_enc)), FLT_MAX)
    code  = e2m1(clamp(x * enc_b, -6, 6))
    x_hat = fp32(code) * fp32(s_b) * (1 / S_enc)

``S_enc * fp32(1/6)`` comes first: dividing the amax by 6 instead rounds twice and lands on another
E4M3 scale for some amax pairs. s_b has no lower clamp: an underflowed block stores scale 0, and its
elements keep the sign and code of x * FLT_MAX, decoded as zero. A NaN or an infinity anywhere makes
the tensor amax, all scales and all decoded values NaN. (Transformer Engine takes S_enc 1 for an
infinite amax, and its amax ignores NaN: the infinity becomes 2688.)

``block_scales: foldable`` is this project's own: s_b is 1, 1.25 or 1.5 times a power of two, still
an E4M3 number, so that a code times its scale has at most 4 significant bits and NVFP4 folds into
FP8 (``folding.py``). S_enc is then min(384 * 6 / amax_tensor, FLT_MAX), and s_b the nearest such
number up to 384, the upper one of two as near; with ``foldable-up`` the next one up, which never
clips and so leaves stochastic rounding unbiased. Below 2**-7 s_b is a multiple of 2**-9.

``max_scale: 256`` puts 256 in place of 448 in S_enc. ``four_over_six`` gives each block the better
of two scales (``four_over_six.py``). ``sixteen_seventeenths`` (Q_SR of "Quartet II", arXiv
2601.22813, section 3.1; as in fouroversix) is for stochastic rounding: with a = 16/17

    S_enc = min(6 * 448 * a / amax_tensor, FLT_MAX)
    s_b   = e4m3(min((amax_block / (6 * a)) * S_enc, 448))

so that x * enc_b is at most 6 wherever s_b >= 2**-6, and rounding is unbiased there; a choice
between two scales biases it again. (The sources of both decode by code * s_b * amax_tensor /
(6 * 448 * a), which differs from the product with 1 / S_enc by a rounding: a GEMM has one factor
for a tensor.)

``row_scaled`` takes the amax of a row in place of the tensor's, so that each row has an S_enc. Rows
are along the axis that the GEMM contracts: tokens in fprop and dgrad, features in wgrad, whose
operands are transposes. Source: Transformer Engine's ``row_scaled_activation``, which has it for
inputs.
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
    constant,
    encode_scale,
    finite_amax,
    for_each_row,
    multiplier,
    row_amax,
)
from megatron_lowbit.numerics.formats import E2M1, E4M3, decode, encode
from megatron_lowbit.numerics.four_over_six import Selection, better_of

BLOCK = 16
FOLDABLE_MAX = 384.0
_QUARTERS = 1 << 21
"""A quarter of a power of two, in the last bit of FP32."""


def foldable_scales(x: Tensor, up: bool) -> Tensor:
    """Round FP32 numbers >= 0 to 1, 1.25 or 1.5 times powers of two, up or to nearest."""
    x = x.clamp(max=FOLDABLE_MAX)
    bits = x.view(torch.int32)
    power, mantissa = bits & 0x7F800000, bits & 0x7FFFFF
    quarters = (mantissa + (_QUARTERS - 1 if up else _QUARTERS // 2)) // _QUARTERS
    above = (mantissa > 2 * _QUARTERS) if up else (mantissa >= 3 * _QUARTERS)
    quarters = torch.where(above, 4, quarters.clamp(max=2))
    grid = (power + quarters * _QUARTERS).view(torch.float32)
    steps = x * 2.0**9
    rest = steps - steps.floor()
    above = (rest > 0) if up else (rest >= 0.5)
    small = (steps.floor() + above.to(torch.float32)) * 2.0**-9
    return torch.where(x.isnan(), x, torch.where(x < 2.0**-7, small, grid))


@dataclass(frozen=True)
class NVFP4(BlockFormat):
    """The block format, with blocks of 1x16 or 16x16 elements.

    ``scales`` are float8_e4m3fn (R, K/16), for 16x16 blocks repeated for each of the 16 rows,
    as tensor cores read them; ``tensor_scale`` is the decode scale 1 / S_enc, of rows (R, 1).
    """

    block_scales: Literal["e4m3", "foldable", "foldable-up"] = "e4m3"
    four_over_six: Selection = "none"
    max_scale: Literal[448, 256] = 448
    sixteen_seventeenths: bool = False
    row_scaled: bool = False  # type: ignore[misc]  # the other formats' is their class's

    block = BLOCK
    scale_bits = 8
    scale_dtype = torch.float8_e4m3fn
    exact_in_bf16 = True
    OPTIONS: ClassVar = {
        "block_scales": ("e4m3", "foldable", "foldable-up"),
        "four_over_six": ("none", "mse", "mae", "abs_max"),
        "max_scale": (448, 256),
        "sixteen_seventeenths": (False, True),
        "row_scaled": (False, True),
    }

    def __post_init__(self) -> None:
        if self.folds and len(self.options) > 1:
            raise ValueError(f"block_scales: {self.block_scales} takes no other option")
        if self.row_scaled and self.block_rows > 1:
            raise ValueError("row_scaled: blocks of 16x16 lie across rows; use format nvfp4")

    def __str__(self) -> str:
        # Tables have room for 28 characters.
        return super().__str__().replace("four_over_six", "4/6").replace("max_scale", "max")

    @property
    def tensor_scaled(self) -> bool:  # type: ignore[override]
        """True with one scale for the tensor."""
        return not self.row_scaled

    @property
    def draws(self) -> int:  # type: ignore[override]
        """Two where two candidates are rounded."""
        return 1 if self.four_over_six == "none" else 2

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True if a code times its block's scale is an FP8 number."""
        return self.block_scales != "e4m3"

    @property
    def top_scale(self) -> float:
        """Block scale of the tensor's largest number."""
        return FOLDABLE_MAX if self.folds else float(self.max_scale)

    @property
    def element_max(self) -> float:
        """Largest magnitude that a block is scaled to."""
        return E2M1.max * 16.0 / 17.0 if self.sixteen_seventeenths else E2M1.max

    @property
    def multiplies_by_sixth(self) -> bool:
        """True if a block's amax is multiplied by a sixth of S_enc, not divided by the element."""
        return self.four_over_six == "none" and not self.sixteen_seventeenths

    def encode(self, x: Tensor, amax: Tensor, uniform: Tensor | None) -> Encoded:
        amax = row_amax(x).view(-1, 1, 1, 1) if self.row_scaled else finite_amax(amax)
        top = self.element_max * self.top_scale
        s_enc = encode_scale(amax, top)
        s_dec = 1.0 / s_enc
        tiles = blocks(x, self.block_rows, BLOCK)
        amaxes = block_amax(tiles)
        if self.multiplies_by_sixth:
            base = amaxes * (s_enc * constant(1.0 / 6.0, like=x))
        else:
            base = (amaxes / torch.full_like(amaxes, self.element_max)) * s_enc
        if self.four_over_six == "none":
            if self.folds:
                base = foldable_scales(base, self.block_scales == "foldable-up")
            scales = encode(base, E4M3)
            codes = encode((tiles * multiplier(scales, s_dec)).view(x.shape), E2M1, uniform)
        else:
            both = encode(torch.stack([base, base * 1.5]), E4M3)
            random = None if uniform is None else uniform.view(2, *tiles.shape)
            numbers = encode(tiles * multiplier(both, s_dec), E2M1, random)
            scales = both.to(torch.float32)
            values = decode(numbers, E2M1) * scales * amax / torch.full_like(amax, top)
            codes, scales = better_of(numbers, scales, values - tiles, self.four_over_six)
        s_dec = s_dec.view(-1, 1) if self.row_scaled else s_dec
        return codes.view(x.shape), for_each_row(scales, self.block_rows), s_dec


FORMATS = (NVFP4("nvfp4", E2M1, 1), NVFP4("nvfp4-2d", E2M1, BLOCK))
