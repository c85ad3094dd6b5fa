"""Definition of the bits: formats, rounding, transforms and the reference GEMM, in torch only."""

from megatron_lowbit.numerics.block_formats import FORMATS
from megatron_lowbit.numerics.by_name import format_by_name, quantize
from megatron_lowbit.numerics.delayed_scaling import AmaxHistory, DelayedAmax, DelayedScaling
from megatron_lowbit.numerics.gemm import Accumulation, gemm
from megatron_lowbit.numerics.hadamard import Hadamard, hadamard_transform
from megatron_lowbit.numerics.quantizer import (
    Amaxes,
    Operand,
    QuantizedTensor,
    Quantizer,
    Request,
    Requests,
    Rounding,
    ScaleAmaxes,
    quantize_both,
    tensor_amaxes,
)
from megatron_lowbit.numerics.randomness import Draw, derive_key

__all__ = [
    "FORMATS",
    "Accumulation",
    "AmaxHistory",
    "Amaxes",
    "DelayedAmax",
    "DelayedScaling",
    "Draw",
    "Hadamard",
    "Operand",
    "QuantizedTensor",
    "Quantizer",
    "Request",
    "Requests",
    "Rounding",
    "ScaleAmaxes",
    "derive_key",
    "format_by_name",
    "gemm",
    "hadamard_transform",
    "quantize",
    "quantize_both",
    "tensor_amaxes",
]
