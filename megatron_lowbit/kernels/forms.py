"""Forms of a quantized operand on a GPU."""

from enum import Enum


class Form(Enum):
    """Form in which a quantized operand is written. The value is the bits of an element."""

    CODES = 0
    """Codes and scales of its format, which says how many bits they take."""
    BF16 = 16
    """Exact BF16 numbers, with a scale a tensor."""
    FOLDED = 8
    """FP8 with a scale a tensor (``numerics/folding.py``)."""
