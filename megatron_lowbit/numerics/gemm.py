"""The reference GEMM: dequantize, multiply in FP32, or sum as a narrower accumulator would."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.numerics.formats import E4M3, decode, encode
from megatron_lowbit.numerics.quantizer import REFERENCE, Arithmetic, QuantizedTensor


@dataclass(frozen=True)
class Accumulation:
    """A two-level sum: ``promote_every`` products in ``inner`` precision, those sums in FP32.

    Source: DeepSeek-V3's promotion of tensor-core sums. For study: products are of dequantized
    values, in FP32, and the running sum is rounded to nearest-even after each of them (``fp8`` is
    E4M3, saturating). None as ``promote_every`` never promotes.
    """

    inner: Literal["fp32", "bf16", "fp8"] = "fp32"
    promote_every: int | None = 128

    def __post_init__(self) -> None:
        if self.inner not in ("fp32", "bf16", "fp8"):
            raise ValueError(f"accumulation inner {self.inner!r} is not one of fp32, bf16, fp8")
        if self.promote_every is not None and self.promote_every < 1:
            raise ValueError(f"accumulation promote_every {self.promote_every} is not positive")


def gemm(
    lhs: Tensor | QuantizedTensor,
    rhs: Tensor | QuantizedTensor,
    bias: Tensor | None = None,
    accumulation: Accumulation | None = None,
    out_dtype: torch.dtype | None = None,
    arithmetic: Arithmetic = REFERENCE,
) -> Tensor:
    """Compute ``lhs @ rhs.T + bias``: operands have the contracted axis last, as blocks do.

    Args:
        lhs: (M, K), quantized or not.
        rhs: (N, K), quantized or not.
        bias: (N,), added before the product is rounded to a narrower dtype.
        accumulation: how to sum along K, one product after another; None multiplies in FP32 in
            the order that torch's matrix product takes.
        out_dtype: what the product is rounded to at last; None leaves it as it is.
        arithmetic: the engine's elementwise functions, equal to the reference bit for bit.

    Returns:
        (M, N). High-precision operands of one dtype multiply in it, unless an accumulation is
        given. All others multiply in FP32, to which quantized operands are dequantized.
    """
    if (
        isinstance(lhs, Tensor)
        and isinstance(rhs, Tensor)
        and lhs.dtype == rhs.dtype
        and accumulation is None
    ):
        product = F.linear(lhs, rhs, bias)
    else:
        left, right = (
            x.dequantize(arithmetic) if isinstance(x, QuantizedTensor) else x.float()
            for x in (lhs, rhs)
        )
        bias = None if bias is None else bias.float()
        if accumulation is None:
            product = F.linear(left, right, bias)
        else:
            product = _accumulate(left, right, accumulation)
            product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


def _accumulate(lhs: Tensor, rhs: Tensor, accumulation: Accumulation) -> Tensor:
    outer = lhs.new_zeros((lhs.shape[0], rhs.shape[0]))
    length = lhs.shape[1]
    interval = accumulation.promote_every or max(length, 1)
    for start in range(0, length, interval):
        inner = torch.zeros_like(outer)
        for k in range(start, min(start + interval, length)):
            inner = _narrow(inner + torch.outer(lhs[:, k], rhs[:, k]), accumulation.inner)
        outer += inner
    return outer


def _narrow(total: Tensor, precision: str) -> Tensor:
    if precision == "bf16":
        return total.to(torch.bfloat16).float()
    if precision == "fp8":
        return decode(encode(total, E4M3), E4M3)
    return total
