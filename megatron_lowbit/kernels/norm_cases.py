"""Cases that the kernel of norm and cast takes; Triton is not needed to ask."""

import torch
from torch import Tensor

from megatron_lowbit.numerics import Request, Rounding
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm

WIDEST = 2**15
"""Columns that a program can hold."""


def takes(x: Tensor, norm: MXNorm | RMSNorm, request: Request) -> bool:
    """Check whether the kernel takes a case: usual norms, blocks of one row, nearest rounding."""
    quantizer = request.quantizer
    return (
        (isinstance(norm, RMSNorm) or norm.p in (1, 2))
        and quantizer.rounding is Rounding.NEAREST_EVEN
        and quantizer.has_kernel
        and quantizer.format.block_rows == 1
        and request.hadamard is None
        and x.numel() > 0
        and x.shape[1] <= WIDEST
        and x.shape[1] % quantizer.format.block == 0
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )
