"""MXNorm and the cast after it in one pass: a program takes whole rows.

Bit for bit :class:`megatron_lowbit.numerics.mxnorm.MXNorm` and the quantizer, for p of 1 and 2. A
format with a tensor scale takes a pass before, for the amax of what is normalized.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.elements import abs_bits
from megatron_lowbit.kernels.launch import outputs
from megatron_lowbit.kernels.operands import Values
from megatron_lowbit.kernels.quantize import tile_side
from megatron_lowbit.kernels.tiles import load_tile
from megatron_lowbit.numerics import QuantizedTensor, Request, Rounding
from megatron_lowbit.numerics.mxnorm import MXNorm, absmax_constant

WIDEST = 2**15
"""Columns that a program can hold."""
_TILE_ELEMENTS = 2**13


def takes(x: Tensor, norm: MXNorm, request: Request) -> bool:
    """Whether :func:`normalize_quantize` does: the usual norms, blocks of one row, to nearest."""
    quantizer = request.quantizer
    return (
        norm.p in (1, 2)
        and not norm.rounded
        and quantizer.rounding is Rounding.NEAREST_EVEN
        and quantizer.format.block_rows == 1
        and request.hadamard is None
        and x.numel() > 0
        and x.shape[1] <= WIDEST
        and x.shape[1] % quantizer.format.block == 0
        and x.dtype in (torch.float32, torch.bfloat16)
    )


def normalize_quantize(
    x: Tensor, norm: MXNorm, request: Request, values: bool
) -> tuple[QuantizedTensor | Values, Tensor]:
    """x (R, C) normalized and quantized along its rows, and the FP32 (R, 1) that it was times.

    Of a case that it :func:`takes`. ``values``: BF16 numbers in place of codes and scales.
    """
    rows, columns = x.shape
    block, width = request.quantizer.format.block, triton.next_power_of_2(columns)
    rho = torch.empty((rows, 1), device=x.device)
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    height = max(1, _TILE_ELEMENTS // width)
    even = rows % height == 0 and columns == width
    options = {"num_warps": 8 if height * width > 2**12 else 4, "enable_fp_fusion": False}

    def launch(side, most, *arguments) -> None:
        mxnorm_kernel[(triton.cdiv(rows, height),)](
            x, *x.stride(), rows, columns, absmax_constant(norm.p, block), norm.eps, rho, most,
            *arguments, height, width, block, (width // block).bit_length() - 1, int(norm.p), side,
            even, **options,
        )  # fmt: skip

    amax = None
    if request.quantizer.format.tensor_scaled:
        launch(None, found, None, None, None, None)
        amax = found.view(torch.float32)
        amax = request.scale_amax(amax) if request.scale_amax else amax
    arguments, side, made = outputs(request, x, amax, False, values, False)
    _, _, codes, scales, tensor_scale, *_ = arguments
    # A row of blocks is one tensor here, not points.
    codes = codes if values else codes.view(torch.uint8)
    launch(side._replace(points=0), None, amax, codes, scales, tensor_scale)
    return made, rho


@triton.jit(do_not_specialize=["constant", "eps"])
def mxnorm_kernel(
    x, stride_r, stride_c, R, C, constant, eps, rho_out, most_out,
    amax, codes, scales, tensor_scale,
    TM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """TM rows: what they are multiplied by, and, with S, what they are quantized to.

    Without S the largest normalized magnitude, as FP32 bits, is maxed into ``most_out``.
    """
    row0, col0 = tl.program_id(0) * TM, tl.program_id(1)
    blocks: tl.constexpr = WIDTH // BLOCK
    tile = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, WIDTH, EVEN)
    bits = tl.max(tl.reshape(abs_bits(tile), (TM, blocks, BLOCK)), 2)
    most = bits.to(tl.float32, bitcast=True)
    powers = most if P == 1 else most * most
    for i in tl.static_range(LEVELS):
        powers = tl.sum(tl.reshape(powers, (TM, 2, blocks >> (i + 1))), 1)
    total = tl.reshape(powers, (TM,))
    mean = tl.div_rn(total, tl.zeros_like(total) + C // BLOCK)
    root = mean if P == 1 else tl.sqrt_rn(mean)
    rho = tl.div_rn(tl.zeros_like(root) + constant, root + eps)
    r = row0 + tl.arange(0, TM)
    tl.store(rho_out + r, rho, mask=r < R)
    if S is not None:
        tile_side(
            tile * rho[:, None], row0, col0, R, C, amax, codes, scales, tensor_scale,
            0, None, None, 0, TM, WIDTH, S, False, EVEN,
        )  # fmt: skip
    else:
        normalized = tl.where((r < R)[:, None], most * rho[:, None], 0.0)
        tl.atomic_max(most_out, tl.max(tl.max(abs_bits(normalized), 1), 0))
