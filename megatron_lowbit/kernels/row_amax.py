"""The amax of each row of a matrix and of each row of its transpose, from one read."""

import triton
import triton.language as tl

from megatron_lowbit.kernels.elements import abs_bits
from megatron_lowbit.kernels.hadamard import transform_tile
from megatron_lowbit.kernels.tiles import load_tile


@triton.jit(do_not_specialize=["row_signs", "col_signs"])
def row_amax_kernel(
    x, stride_r, stride_c, R, C, row_amax, row_signs, col_amax, col_signs,
    TM: tl.constexpr, TN: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute amaxes of rows of x (R, C) after ROW and of its transpose after COL, as FP32 bits.

    They are maxed into zeroed int32 (R,) and (C,), either of which may be None. ROW and COL are
    Transforms, or None where x as it is counts.
    """
    tiles = tl.cdiv(C, TN)
    row0 = (tl.program_id(0) // tiles) * TM
    col0 = (tl.program_id(0) % tiles) * TN
    tile = load_tile(x, stride_r, stride_c, row0, col0, R, C, TM, TN, EVEN)
    if row_amax is not None:
        _max_rows(tile, row_amax, row_signs, row0, R, TM, TN, ROW)
    if col_amax is not None:
        _max_rows(tl.trans(tile), col_amax, col_signs, col0, C, TN, TM, COL)


@triton.jit
def _max_rows(x, amax, signs, row0, R, A: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """Reduce the rows of a tile [A, B] into ``amax`` from ``row0`` on, by maximum."""
    if H is not None:
        x = transform_tile(x, signs, A, B, H)
    r = row0 + tl.arange(0, A)
    tl.atomic_max(amax + r, tl.max(abs_bits(x), 1), mask=r < R, sem="relaxed")
