"""What the bits are: formats, rounding, transforms and the reference GEMM, on torch alone."""

from megatron_lowbit.numerics.formats import Rounding
from megatron_lowbit.numerics.gemm import gemm
from megatron_lowbit.numerics.hadamard import Hadamard, hadamard_transform
from megatron_lowbit.numerics.philox import Draw, derive_key
from megatron_lowbit.numerics.quantizer import (
    FORMATS,
    Operand,
    QuantizedTensor,
    Quantizer,
    format_by_name,
    quantize,
)

__all__ = [
    "FORMATS",
    "Draw",
    "Hadamard",
    "Operand",
    "QuantizedTensor",
    "Quantizer",
    "Rounding",
    "derive_key",
    "format_by_name",
    "gemm",
    "hadamard_transform",
    "quantize",
]
