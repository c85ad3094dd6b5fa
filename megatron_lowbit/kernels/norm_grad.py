"""Backward of a norm in one kernel: a program takes whole rows.

Bit for bit ``norm_grad`` of ``numerics/mxnorm.py``. For BF16 it reads the gradient and the input
and writes a gradient, 6 bytes a value: 0.1 ms for 16384 x 4096 at an H200's 4.25 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lowbit.kernels.elements import as_dtype
from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.norm import WARPS, grouped, tile_of, total, tree
from megatron_lowbit.kernels.norm_cases import WIDEST
from megatron_lowbit.kernels.tiles import load_tile, store_tile
from megatron_lowbit.numerics import mxnorm

_PART = 32
"""Fewest columns of a part."""
_COLUMNS_OF_WARPS = 2**12
"""Columns up to which four warps hold two rows in registers."""


def norm_grad(grad: Tensor, x: Tensor, rho: Tensor) -> Tensor:
    """Return the gradient (R, C) with respect to x, in x's dtype.

    Args:
        grad: (R, C), FP32 or BF16, the gradient with respect to ``rho * x``.
        x: (R, C), FP32 or BF16, the norm's input.
        rho: FP32 (R, 1), what its rows were multiplied by.
    """
    rows, columns = x.shape
    dtypes = {grad.dtype, x.dtype} <= {torch.float32, torch.bfloat16}
    if not (dtypes and x.numel() and _PART <= columns <= WIDEST):
        return mxnorm.norm_grad(grad, x, rho)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    height, part = tile_of(columns, _PART)
    _norm_grad_kernel[(cdiv(rows, height),)](
        grad, *grad.stride(), x, *x.stride(), rows, columns, rho.contiguous(), out,
        height, part, cdiv(columns, part), rows % height == 0 and columns % part == 0,
        num_warps=WARPS if columns <= _COLUMNS_OF_WARPS else 4 * WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


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
