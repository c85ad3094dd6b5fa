"""A norm and the cast after it in one pass, and its backward pass: a program takes whole rows.

Bit for bit the norms of ``numerics/`` (MXNorm for p of 1 and 2) and the quantizer. A format with a
tensor scale takes a pass before, for the amax of the normalized rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.elements import abs_bits, as_dtype, tile_block_amax
from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.operands import ExactBF16
from megatron_lowbit.kernels.quantize import QuantizeSpec, SideArguments
from megatron_lowbit.kernels.quantize_side import tile_side
from megatron_lowbit.kernels.routes import WIDEST_ROW, Form
from megatron_lowbit.kernels.sides import allocator, layout_of
from megatron_lowbit.kernels.tiles import load_tile, store_tile
from megatron_lowbit.numerics import QuantizedTensor, Request, mxnorm
from megatron_lowbit.numerics.mxnorm import MXNorm, absmax_constant, rounded_table
from megatron_lowbit.numerics.rmsnorm import GROUP, RMSNorm

_TILE_ELEMENTS, _PARTS, WARPS = 2**12, 8, 4
_GRAD_PART = 32
"""Fewest columns of a part in the backward pass."""
_COLUMNS_OF_WARPS = 2**12
"""Columns up to which four warps hold two rows in registers."""
RMS, _POST_ROUND = tl.constexpr(0), tl.constexpr(-1)
"""RMSNorm, and MXNorm from rounded absmaxes, where other norms have their p."""
_GROUP_LEVELS = tl.constexpr(GROUP.bit_length() - 1)


def normalize_quantize(
    x: Tensor,
    norm: MXNorm | RMSNorm,
    request: Request,
    form: Form,
    gain: Tensor | None = None,
    amax: Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> tuple[QuantizedTensor | ExactBF16, Tensor]:
    """Normalize x (R, C) and quantize it along its rows, of a case that ``takes_norm`` accepts.

    RMSNorm's result is rounded to x's dtype before it is quantized, as between two layers.

    Args:
        x: the norm's input.
        norm: of each row.
        request: how the rows are quantized.
        form: codes or BF16 numbers.
        gain: (C,), which multiplies RMSNorm's result.
        amax: FP32 scalar, of the result, where a format has a tensor scale and it is known.
        out: codes and scales to fill; None for new ones.

    Returns:
        The operand, and the rows' FP32 factors (R, 1).
    """
    block = request.quantizer.format.block
    if request.quantizer.format.tensor_scaled and amax is None:
        amax = normalized_amax(x, norm, block, gain)
    side, arguments, operand = row_side(request, x, amax, form, out)
    return operand, _launch(x, norm, block, gain, None, arguments, side)


def normalized_amax(
    x: Tensor, norm: MXNorm | RMSNorm, block: int, gain: Tensor | None = None
) -> Tensor:
    """Return the amax (FP32 scalar) of x (R, C) normalized, with blocks of ``block``."""
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    _launch(x, norm, block, gain, amax, (None,) * 4, None)
    return amax.view(torch.float32)


def _launch(
    x: Tensor,
    norm: MXNorm | RMSNorm,
    block: int,
    gain: Tensor | None,
    amax_out: Tensor | None,
    arguments: tuple,
    side: QuantizeSpec | None,
) -> Tensor:
    """Launch the kernel to quantize a side, or only for the amax; return the rows' factors."""
    rows, columns = x.shape
    rho = torch.empty((rows, 1), device=x.device)
    height, part = tile_of(columns, block)
    p, constant, eps = statistic(norm, block)
    if p == _POST_ROUND.value:
        constant = rounded_table(block, x.device)
    norm_kernel[(cdiv(rows, height),)](
        x, *x.stride(), rows, columns, gain, constant, eps, None, rho, amax_out, *arguments,
        height, part, cdiv(columns, part), block, p, side,
        rows % height == 0 and columns % part == 0, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return rho


def norm_grad(grad: Tensor, x: Tensor, rho: Tensor) -> Tensor:
    """Return the gradient (R, C) with respect to x, in x's dtype, as ``numerics/mxnorm.py`` does.

    For BF16 it moves 6 bytes per value: 0.1 ms for 16384 x 4096 at an H200's 4.25 TB/s.

    Args:
        grad: (R, C), FP32 or BF16, the gradient with respect to ``rho * x``.
        x: (R, C), FP32 or BF16, the norm's input.
        rho: FP32 (R, 1), by which its rows were multiplied.
    """
    rows, columns = x.shape
    dtypes = {grad.dtype, x.dtype} <= {torch.float32, torch.bfloat16}
    if not (dtypes and x.numel() and _GRAD_PART <= columns <= WIDEST_ROW):
        return mxnorm.norm_grad(grad, x, rho)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    height, part = tile_of(columns, _GRAD_PART)
    _norm_grad_kernel[(cdiv(rows, height),)](
        grad, *grad.stride(), x, *x.stride(), rows, columns, rho.contiguous(), out,
        height, part, cdiv(columns, part), rows % height == 0 and columns % part == 0,
        num_warps=WARPS if columns <= _COLUMNS_OF_WARPS else 4 * WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def statistic(norm: MXNorm | RMSNorm, block: int) -> tuple[int, float, float]:
    """Return a norm's constants for a kernel: P, the constant over which the RMS is, eps.

    MXNorm from rounded absmaxes has ``rounded_table`` on the device in place of the constant.
    """
    if isinstance(norm, RMSNorm):
        return RMS.value, 1.0, norm.eps
    if norm.rounded:
        return _POST_ROUND.value, 1.0, norm.eps
    return int(norm.p), absmax_constant(norm.p, block), norm.eps


def row_side(
    request: Request, x: Tensor, amax: Tensor | None, form: Form, out: QuantizedTensor | None = None
) -> tuple[QuantizeSpec, tuple, QuantizedTensor | ExactBF16]:
    """Return the constexpr that quantizes rows like x's, a kernel's arguments, and the operand.

    The kernel fills ``out``, or a new operand.
    """
    layout = layout_of(request.keyless, form, *x.shape, False, lanes=False)
    if out is None:
        operand, written = allocator(layout, x.device)()
    else:
        operand, written = out, (out.codes, out.scales, out.tensor_scale)
    codes, scales = (
        tensor.view(layout.views[name]) if name in layout.views and tensor is not None else tensor
        for name, tensor in zip(("codes", "scales"), written, strict=False)
    )
    return layout.spec, (amax, codes, scales, written[2]), operand


def tile_of(columns: int, block: int) -> tuple[int, int]:
    """Return rows of a program and columns of a part of them: found by trying on an H200."""
    width = triton.next_power_of_2(columns)
    # Rows in parts, so that none of a width that is no power of two is computed in vain.
    part = width if columns == width else max(width // _PARTS, block)
    return max(1, _TILE_ELEMENTS // width), part


@triton.jit(do_not_specialize=["constant", "eps"])
def norm_kernel(
    x, stride_r, stride_c, R, C, gain, constant, eps, y, rho_out, amax_out,
    amax, codes, scales, tensor_scale,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Normalize TM rows, in PARTS of TN columns, and quantize them by S.

    Without S the rows are written to ``y``, where that is given, and the largest normalized
    magnitude, as FP32 bits, is maxed into ``amax_out``.
    """
    # Always 0, in a form that says that loads are aligned.
    row0, col0 = tl.program_id(0) * TM, tl.program_id(1) * TN
    parts = ()
    for i in tl.static_range(PARTS):
        part = load_tile(x, stride_r, stride_c, row0, col0 + i * TN, R, C, TM, TN, EVEN)
        parts = parts + (part,)
    gains = load_gain(gain, col0, C, TN, PARTS)
    finish_rows(
        parts, row0, col0, R, C, gain, gains, constant, eps, y, rho_out, amax_out, amax, codes,
        scales, tensor_scale, x.dtype.element_ty, TM, TN, PARTS, BLOCK, P, S, EVEN,
    )  # fmt: skip


@triton.jit
def load_gain(gain, col0, C, TN: tl.constexpr, PARTS: tl.constexpr):
    """Load ``gain`` [C] as PARTS tensors [TN], zeros behind C; none where it is None."""
    gains = ()
    if gain is not None:
        for i in tl.static_range(PARTS):
            c = col0 + i * TN + tl.arange(0, TN)
            gains = gains + (tl.load(gain + c, mask=c < C, other=0.0),)
    return gains


@triton.jit
def finish_rows(
    parts, row0, col0, R, C, gain, gains, constant, eps, y, rho_out, amax_out,
    amax, codes, scales, tensor_scale, DTYPE: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Normalize TM rows, ``parts`` [TM, TN] with zeros behind C, and store what is asked for.

    Into ``y`` the normalized rows, times ``gains`` where there is a ``gain``, in y's dtype; by S
    their codes; into ``rho_out`` what they were multiplied by; into ``amax_out`` the largest
    magnitude's bits. What RMSNorm gives is rounded to DTYPE before all that.
    """
    block_amaxes = ()
    if gain is None:
        for i in tl.static_range(PARTS):
            block_amaxes = block_amaxes + (tile_block_amax(parts[i], TM, TN, BLOCK),)
    rho = inverse_rms(parts, block_amaxes, C, constant, eps, TM, TN, PARTS, BLOCK, P)
    r = row0 + tl.arange(0, TM)
    if rho_out is not None:
        tl.store(rho_out + r, rho, mask=r < R)
    bits = tl.zeros((TM,), tl.int32)
    if S is not None and S.row_scaled:
        row_amax = _row_amax(parts, rho, gain, gains, DTYPE, TM, PARTS, P)
    for i in tl.static_range(PARTS):
        part = _normalized(parts, i, rho, gain, gains, DTYPE, P)
        if gain is None:
            # Rounding is monotonic: the largest of the products is the product of the largest.
            block_amax = block_amaxes[i] * rho[:, None]
            if P == RMS:
                block_amax = as_dtype(block_amax, DTYPE)
        else:
            block_amax = tile_block_amax(part, TM, TN, BLOCK)
        if y is not None:
            store_tile(y, as_dtype(part, y.dtype.element_ty), row0, col0 + i * TN, R, C, EVEN)
        if S is not None:
            if S.row_scaled:
                block_amax = row_amax
            side = SideArguments(C, amax, codes, scales, tensor_scale, 0, None, None, 0)
            tile_side(part, block_amax, row0, col0 + i * TN, R, side, TM, TN, S, False, EVEN)
        if amax_out is not None:
            bits = tl.maximum(bits, tl.max(abs_bits(block_amax), 1))
    if amax_out is not None:
        tl.atomic_max(amax_out, tl.max(tl.where(r < R, bits, 0), 0))


@triton.jit
def _normalized(parts, i: tl.constexpr, rho, gain, gains, DTYPE: tl.constexpr, P: tl.constexpr):
    """Normalize part ``i`` [TM, TN] by ``rho`` [TM] and its gain; RMSNorm's is rounded to DTYPE."""
    part = parts[i] * rho[:, None]
    if gain is not None:
        part = part * gains[i].to(tl.float32)[None, :]
    if P == RMS:
        part = as_dtype(part, DTYPE)
    return part


@triton.jit
def _row_amax(
    parts, rho, gain, gains, DTYPE: tl.constexpr, TM: tl.constexpr, PARTS: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Return [TM], the largest magnitudes of normalized rows; NaN wins."""
    bits = tl.zeros((TM,), tl.int32)
    for i in tl.static_range(PARTS):
        part = _normalized(parts, i, rho, gain, gains, DTYPE, P)
        bits = tl.maximum(bits, tl.max(abs_bits(part), 1))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse_rms(
    parts, block_amaxes, C, constant, eps, TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Return [TM], what rows of C columns are to be multiplied by.

    ``parts`` are [TM, TN], zeros behind C, and ``block_amaxes`` their blocks' largest magnitudes.
    """
    sums = ()
    for i in tl.static_range(PARTS):
        if P == RMS:
            sums = sums + (grouped(parts[i] * parts[i], TM, TN, 0),)
        elif P == _POST_ROUND:
            sums = sums + (_power_of_two_below(block_amaxes[i]),)
        else:
            sums = sums + (block_amaxes[i] if P == 1 else block_amaxes[i] * block_amaxes[i],)
    summed = total(tree(sums, PARTS), TM)
    count = tl.zeros_like(summed) + (C if P == RMS else C // BLOCK)
    mean = tl.div_rn(summed, count)
    if P == _POST_ROUND:
        return tl.div_rn(tl.zeros_like(mean) + 1.0, _rms_of_rounded(mean, constant) + eps)
    elif P == RMS:
        return tl.div_rn(tl.zeros_like(mean) + constant, tl.sqrt_rn(mean + eps))
    else:
        top = tl.zeros_like(mean) + constant
        return tl.div_rn(top, (mean if P == 1 else tl.sqrt_rn(mean)) + eps)


@triton.jit
def _power_of_two_below(x):
    """Round normal positive numbers down to powers of two, subnormal ones to 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _rms_of_rounded(mean, table):
    """Return the RMS [TM] of rows by the mean of rounded absmaxes; ``table`` [257] inverts it."""
    bits = mean.to(tl.int32, bitcast=True)
    index = (bits >> 15) & 255
    fraction = (bits & 32767).to(tl.float32) * (1.0 / 32768)
    low, high = tl.load(table + index), tl.load(table + index + 1)
    return _power_of_two_below(mean) * (low + (high - low) * fraction)


@triton.jit
def grouped(values, TM: tl.constexpr, N: tl.constexpr, LEVEL: tl.constexpr):
    """Sum groups of neighbours, by neighbours: within a thread as rows are loaded."""
    if LEVEL == _GROUP_LEVELS:
        return values
    else:
        pairs = tl.sum(tl.reshape(values, (TM, N // 2, 2)), 2)
        return grouped(pairs, TM, N // 2, LEVEL + 1)


@triton.jit
def tree(values, N: tl.constexpr):
    """Sum a tuple of N tensors, upper half added to lower half, zeros behind."""
    if N == 1:
        return values[0]
    else:
        HALF: tl.constexpr = triton.next_power_of_2(N) // 2
        sums = ()
        for i in tl.static_range(HALF):
            if i + HALF < N:
                sums = sums + (values[i] + values[i + HALF],)
            else:
                sums = sums + (values[i],)
        return tree(sums, HALF)


@triton.jit
def total(values, TM: tl.constexpr):
    """Sum [TM, N] to [TM], upper half added to lower half."""
    N: tl.constexpr = values.shape[1]
    if N > 1:
        return total(tl.sum(tl.reshape(values, (TM, 2, N // 2)), 1), TM)
    else:
        return tl.reshape(values, (TM,))


@triton.jit
def _norm_grad_kernel(
    grad, grad_stride_r, grad_stride_c, x, stride_r, stride_c, R, C, rho_in, out,
    TM: tl.constexpr, TN: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of TM rows, in PARTS of TN columns: the sum of products first."""
    row0, col0 = tl.program_id(0) * TM, tl.program_id(1) * TN  # the latter is always 0
    grads, values, sums = (), (), ()
    for i in tl.static_range(PARTS):
        col = col0 + i * TN
        g = load_tile(grad, grad_stride_r, grad_stride_c, row0, col, R, C, TM, TN, EVEN)
        v = load_tile(x, stride_r, stride_c, row0, col, R, C, TM, TN, EVEN)
        grads, values = grads + (g,), values + (v,)
        sums = sums + (grouped(g * v, TM, TN, 0),)
    dot = total(tree(sums, PARTS), TM)
    along = tl.div_rn(dot, tl.zeros_like(dot) + C)
    r = row0 + tl.arange(0, TM)
    rho = tl.load(rho_in + r, mask=r < R, other=0.0)
    factor = rho * rho * rho * along
    for i in tl.static_range(PARTS):
        part = rho[:, None] * grads[i] - factor[:, None] * values[i]
        store_tile(out, as_dtype(part, out.dtype.element_ty), row0, col0 + i * TN, R, C, EVEN)
