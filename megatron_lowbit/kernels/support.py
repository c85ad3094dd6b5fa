"""Formats that the kernels of GPUs take; Triton is not needed to ask."""

from functools import singledispatch
from typing import NamedTuple

from megatron_lowbit.numerics import Quantizer
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tensor, FP8Tile
from megatron_lowbit.numerics.block_formats.fp8_row import FP8Row
from megatron_lowbit.numerics.block_formats.ms_eden import AMAX_ELEMENT, AMAX_SCALE, TOP, MSEden
from megatron_lowbit.numerics.block_formats.mx import MX
from megatron_lowbit.numerics.block_formats.nvfp4 import NVFP4
from megatron_lowbit.numerics.block_formats.quartet2 import MAX_SCALE, Quartet2
from megatron_lowbit.numerics.block_formats.tetrajet2 import TetraJet2
from megatron_lowbit.numerics.block_formats.ue5m3 import SCALE, UE5M3, UE5M3_MAX
from megatron_lowbit.numerics.formats import E2M1, E4M3, ElementFormat


class FormatKernel(NamedTuple):
    """The Triton side of a format.

    ``scales`` names a function, as ``module:function``: of the amaxes of blocks
    (``kernels/scales.py``) or, where ``from_numbers``, of 16 numbers of a block
    (``kernels/block_codes.py``). It gets ``options``. ``scale_element`` is the element format of
    stored scales, None for powers of two and FP32. Decoding multiplies block and tensor scale first
    where ``multiplies_scales``, and rounds there.
    """

    scales: str
    options: tuple[float, ...] = ()
    scale_element: ElementFormat | None = None
    from_numbers: bool = False
    multiplies_scales: bool = False


_SCALES, _BLOCK_CODES = "megatron_lowbit.kernels.scales:", "megatron_lowbit.kernels.block_codes:"


@singledispatch
def kernel_of(format: BlockFormat) -> FormatKernel | None:
    """Return the Triton side of a format; None for one that GPUs quantize in eager torch.

    Other formats are added by ``kernel_of.register``.
    """
    return None


@kernel_of.register
def _(format: MX) -> FormatKernel:
    rounding = format.OPTIONS["scale_rounding"].index(format.scale_rounding)
    exponent = format.element.max_exponent
    fraction = round((format.element.max / 2.0**exponent - 1.0) * 2**23)
    options = rounding, int(format.three_quarters), exponent, fraction
    return FormatKernel(f"{_SCALES}mx_scales", options)


@kernel_of.register
def _(format: FP8Tile) -> FormatKernel:
    return FormatKernel(f"{_SCALES}fp8_tile_scales", (int(format.scale_format == "pow2"),))


@kernel_of.register
def _(format: FP8Tensor) -> FormatKernel:
    return FormatKernel(f"{_SCALES}fp8_tensor_scales", (int(format.scale_format == "pow2"),))


@kernel_of.register
def _(format: FP8Row) -> FormatKernel:
    return FormatKernel(f"{_SCALES}fp8_row_scales")


@kernel_of.register
def _(format: UE5M3) -> FormatKernel:
    top = UE5M3_MAX * E2M1.max if format.tensor_scaled else 0.0
    return FormatKernel(f"{_SCALES}ue5m3_scales", (top,), SCALE)


@kernel_of.register
def _(format: NVFP4) -> FormatKernel:
    top, divisor = format.element_max * format.top_scale, format.element_max
    if format.four_over_six != "none":
        selection = format.OPTIONS["four_over_six"].index(format.four_over_six)
        options = top, divisor, 0, selection
        return FormatKernel(f"{_BLOCK_CODES}four_over_six", options, E4M3, from_numbers=True)
    rounding = format.OPTIONS["block_scales"].index(format.block_scales)
    options = top, 0.0 if format.multiplies_by_sixth else divisor, rounding, 0
    return FormatKernel(f"{_SCALES}nvfp4_scales", options, E4M3)


@kernel_of.register
def _(format: Quartet2) -> FormatKernel:
    return FormatKernel(f"{_BLOCK_CODES}quartet2", (MAX_SCALE, E2M1.max), E4M3, True, True)


@kernel_of.register
def _(format: MSEden) -> FormatKernel:
    options = (TOP,) if format.arithmetic == "torchao" else (AMAX_SCALE, AMAX_ELEMENT)
    name = f"{_BLOCK_CODES}ms_eden_{format.arithmetic}"
    return FormatKernel(name, options, E4M3, from_numbers=True)


@kernel_of.register
def _(format: TetraJet2) -> FormatKernel:
    return FormatKernel(f"{_BLOCK_CODES}tetrajet2", (E4M3.max, E2M1.max), E4M3, from_numbers=True)


def has_kernel(quantizer: Quantizer) -> bool:
    """Return True if the kernels quantize so; the reference does otherwise."""
    return not quantizer.splits_mean and kernel_of(quantizer.format) is not None
