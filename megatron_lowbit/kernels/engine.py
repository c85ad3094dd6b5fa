"""The one table: where the formats' arithmetic runs, by device, with the reason for it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lowbit.kernels import compiled
from megatron_lowbit.numerics import gemm as reference_gemm
from megatron_lowbit.numerics.quantizer import QuantizedTensor, Quantizer


@dataclass(frozen=True)
class Engine:
    """The functions a linear layer calls.

    ``quantize(quantizer, x, **options)`` takes the options of ``Quantizer.__call__``;
    ``gemm(lhs, rhs, bias=None, accumulation=None)`` is :func:`megatron_lowbit.numerics.gemm`.
    ``reason`` says why this engine.
    """

    name: str
    quantize: Callable[..., QuantizedTensor]
    gemm: Callable[..., Tensor]
    reason: str


def _reference_quantize(quantizer: Quantizer, x: Tensor, **options) -> QuantizedTensor:
    return quantizer(x, **options)


def reference(reason: str) -> Engine:
    """The reference arithmetic in eager torch, on any device."""
    return Engine("reference", _reference_quantize, reference_gemm, reason)


def select_engine(device: torch.device, request: str = "auto") -> Engine:
    """The engine for a device.

    Args:
        device: where the tensors are.
        request: ``auto``, or ``reference`` for the eager arithmetic everywhere.
    """
    if request == "reference":
        return reference("asked for")
    if device.type == "cpu":
        missing = compiled.missing_compiler()
        if missing is None:
            return Engine("compiled", compiled.quantize, compiled.gemm, "CPU with a C++ compiler")
        return reference(missing)
    return reference(f"no fused kernels for {device.type} yet")
