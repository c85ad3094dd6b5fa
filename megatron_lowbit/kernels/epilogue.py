"""What follows a GEMM: tensor scales and a bias, in FP32, in one pass over the product."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def scaled(y: Tensor, scales: list[Tensor], bias: Tensor | None) -> Tensor:
    """``y * scales + bias`` in place: y (M, N) contiguous, scales FP32 scalars, bias (N,)."""
    if (scales or bias is not None) and y.numel():
        first, second = [*scales, None, None][:2]
        _scale_kernel[(triton.cdiv(y.numel(), _BLOCK),)](
            y, first, second, bias, y.numel(), y.shape[1], _BLOCK, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return y


@triton.jit
def _scale_kernel(y, first, second, bias, N, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < N
    value = tl.load(y + at, mask=inside).to(tl.float32)
    if first is not None:
        factor = tl.load(first)
        if second is not None:
            factor = factor * tl.load(second)
        value = value * factor
    if bias is not None:
        value = value + tl.load(bias + at % columns, mask=inside).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
